"""Prompt log-probabilities and embeddings, computed from a step's residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.runner import InFlight, ModelRunner
from ttpu_serve.scheduling.scheduler_output import ScheduledStep

NOT_A_NUMBER = (
    "the model's output is not a number, or no token was allowed: the checkpoint is damaged, it overflows in this "
    "dtype (try float32), or the request forbids every token."
)


def read_prompts(
    step: ScheduledStep, done: InFlight, outputs: Sequence[SequenceOutput | None], runner: ModelRunner
) -> None:
    """Store prompt log-probabilities and pooled states of a step. `outputs` belong to the step's requests, with None
    for requests that are gone. The stream is fetched once and the head runs once for all of them. An error here fails
    the requests that it concerns."""
    begins = np.cumsum(step.counts) - step.counts
    scored: list[tuple[SequenceOutput, int, int, list[int]]] = []
    stream: np.ndarray | None = None
    for index, output in enumerate(outputs):
        if output is None or not output.wants_prompt:
            continue
        request, start, count = output.request, int(step.starts[index]), int(step.counts[index])
        if start >= len(request.prompt):
            continue
        begin = int(begins[index])
        if request.pooling is None:
            if targets := request.prompt[start + 1 : start + 1 + count]:
                scored.append((output, start, begin, targets))
            continue
        try:
            stream = done.read_hidden() if stream is None else stream
            _pool(output, stream[begin : begin + count].astype(np.float32), start)
        except Exception as error:
            output.break_by(error)
    if not scored:
        return
    wanted = np.zeros(step.num_tokens, np.int32)
    for _, _, begin, targets in scored:
        wanted[begin : begin + len(targets)] = targets
    try:
        values = runner.prompt_logprobs(done, wanted)
    except Exception as error:
        for output, *_ in scored:
            output.break_by(error)
        return
    for output, start, begin, targets in scored:
        own = slice(begin, begin + len(targets))
        try:
            output.add_prompt_logprobs(
                start + 1, targets, values.logprob[own], values.top_tokens[own], values.top_logprobs[own]
            )
        except Exception as error:
            output.break_by(error)


def finish_pooling(output: SequenceOutput) -> None:
    """End a request whose prompt is complete with its embedding, of unit length."""
    assert output.pooled is not None
    request = output.request
    vector = output.pooled / (len(request.prompt) if request.pooling == "mean" else 1)
    if not np.isfinite(vector).all():
        output.fail(NOT_A_NUMBER)
        return
    output.embedding = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    output.end("stop")


def _pool(output: SequenceOutput, stream: np.ndarray, start: int) -> None:
    """Add the part of a prompt that begins at `start`: its last token's state, its first one's, or the sum of all."""
    if output.request.pooling == "last":
        output.pooled = stream[-1]
    elif output.request.pooling == "cls":
        output.pooled = stream[0] if start == 0 or output.pooled is None else output.pooled
    else:
        before = 0 if start == 0 or output.pooled is None else output.pooled
        output.pooled = stream.sum(0) + before
