"""Collects the deltas of offline requests into one `RequestOutput` or `EmbeddingOutput` per request."""

from __future__ import annotations

import time
from dataclasses import replace

from ttpu_core.errors import TTPUError
from ttpu_serve.api.outputs import CompletionOutput, EmbeddingOutput, OutputDelta, RequestMetrics, RequestOutput


class Collector:
    """Accumulates the output of one request."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], sequences: int) -> None:
        outputs = [CompletionOutput(index) for index in range(sequences)]
        metrics = RequestMetrics(time.monotonic())
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, outputs, metrics=metrics)
        self.embedding: EmbeddingOutput | None = None

    def take(self, delta: OutputDelta) -> None:
        """Add a delta.

        Raises:
            TTPUError: the request failed in the engine.
        """
        if delta.error is not None:
            raise TTPUError(delta.error)
        output, sequence = self.output, self.output.outputs[delta.index]
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
