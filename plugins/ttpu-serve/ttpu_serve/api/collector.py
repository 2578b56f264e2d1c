"""Collects the deltas of offline requests into one `RequestOutput` or `EmbeddingOutput` per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ttpu_core.errors import TTPUError
from ttpu_serve.api.outputs import CompletionOutput, EmbeddingOutput, OutputDelta, RequestMetrics, RequestOutput

_SHOWN = 8


class PromptsFailedError(TTPUError):
    """The engine failed at some prompts of a call. It is raised when all other prompts have their outputs. An error of
    a whole step, such as one of the devices, may be raised as it is instead.

    Args:
        outputs: the outputs of all prompts in their order. A failed one of `generate` has sequences with an `error`,
            and what was generated before; a failed one of `embed` is None.
        failed: the numbers of the prompts that failed.
        reason: why the first of these failed.
    """

    def __init__(self, outputs: Sequence[Any], failed: Sequence[int], reason: str) -> None:
        self.outputs, self.failed, self.reason = list(outputs), list(failed), reason
        names = ", ".join(f"prompts[{number}]" for number in failed[:_SHOWN])
        more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        message = (
            f"{len(outputs)} prompts were given, but {names}{more} failed ({reason.rstrip('.')}): this error's "
            "`outputs` holds what there is of each prompt."
        )
        super().__init__(reason if len(outputs) == 1 else message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outputs, self.failed, self.reason), self.__dict__


class Collector:
    """Accumulates the output of one request."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], sequences: int) -> None:
        outputs = [CompletionOutput(index) for index in range(sequences)]
        metrics = RequestMetrics(time.monotonic())
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, outputs, metrics=metrics)
        self.embedding: EmbeddingOutput | None = None

    def take(self, delta: OutputDelta) -> None:
        """Add a delta."""
        output, sequence = self.output, self.output.outputs[delta.index]
        sequence.error = delta.error
        assert output.metrics is not None
        if output.metrics.first_token_time is None:
            output.metrics = replace(output.metrics, first_token_time=time.monotonic())
        sequence.text += delta.text
        sequence.token_ids += delta.token_ids
        if delta.logprobs is not None:
            sequence.logprobs = (sequence.logprobs or []) + delta.logprobs
            chosen = (own[token].logprob for own, token in zip(delta.logprobs, delta.token_ids, strict=True))
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + sum(chosen)
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.embedding is not None:
            self.embedding = EmbeddingOutput(output.request_id, output.prompt_token_ids, delta.embedding)
        output.finished = all(each.finished for each in output.outputs)
        if output.finished:
            output.metrics = replace(output.metrics, finished_time=time.monotonic())

    @property
    def error(self) -> str | None:
        """Why the engine failed at the request; None if it did not."""
        return next((each.error for each in self.output.outputs if each.error is not None), None)


def check_all(collectors: Sequence[Collector], outputs: Sequence[Any]) -> None:
    """Check that the engine failed at none of the requests of a call. `outputs`: what the call returns for them.

    Raises:
        PromptsFailedError: it failed at some.
    """
    errors = {number: one.error for number, one in enumerate(collectors) if one.error is not None}
    if errors:
        raise PromptsFailedError(outputs, [*errors], next(iter(errors.values())))
