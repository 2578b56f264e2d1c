"""Turns sampled rows into the accepted tokens of a sequence. An error here fails one request only."""

from __future__ import annotations

from ttpu_serve.execution.prompt_outputs import NOT_A_NUMBER, finish_pooling
from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.runner import SampledRows


def accepted(sampled: list[int], draft: list[int]) -> list[int]:
    """Return the accepted tokens: the first sampled one, and one more after each draft token that equals the sampled
    token."""
    count = 1
    for guess, token in zip(draft, sampled, strict=False):
        if guess != token:
            break
        count += 1
    return sampled[:count]


def take_row(output: SequenceOutput, sampled: list[int], row: int, values: SampledRows) -> list[int]:
    """Append the tokens of a sequence's rows to its output, and update its text and finish reason. `row` is the first
    row.

    Returns:
        The accepted tokens; empty if the request failed, which its output then records.
    """
    try:
        return _take(output, sampled, row, values)
    except Exception as error:
        output.break_by(error)
        output.fail(output.broken)
        return []


def _take(output: SequenceOutput, sampled: list[int], row: int, values: SampledRows) -> list[int]:
    request = output.request
    if output.broken:
        output.fail(output.broken)
        return []
    if request.pooling is not None:
        finish_pooling(output)
        return sampled[:1]
    if output.guide is not None and output.guide.error is not None:
        output.fail(output.guide.error, output.guide.fault)
        return []
    if min(sampled) < 0:
        output.fail(NOT_A_NUMBER)
        return []
    logprobs = None
    if request.params.logprobs is not None:
        assert values.logprob is not None and values.top_tokens is not None and values.top_logprobs is not None
        logprobs = [
            output.logprobs_of(
                token,
                float(values.logprob[row + place]),
                values.top_tokens[row + place],
                values.top_logprobs[row + place],
                request.params.logprobs,
            )
            for place, token in enumerate(sampled)
        ]
    return sampled[: output.take(sampled, logprobs)]
