"""The output of one sequence while it grows: accepted tokens, finish reason, and the text, tokens and log-probabilities
that are new for the caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ttpu_core.generation.detokenizer import TextStream
from ttpu_serve.api.outputs import ErrorKind, Logprob, OutputDelta
from ttpu_serve.execution.logit_rules import Rules
from ttpu_serve.guided.guides import GuideState
from ttpu_serve.scheduling.request import Request

log = logging.getLogger("ttpu.engine")

TokenLogprobs = dict[int, Logprob]


class SequenceOutput:
    """Text, log-probabilities and finish reason of one sequence.

    Args:
        request: the scheduled request of this sequence.
        request_id: the id of the caller's request.
        index: the sequence's number within the caller's request.
        tokenizer: the model's tokenizer, or None.
        text_of: returns one token as text, for log-probabilities.
    """

    def __init__(
        self, request: Request, request_id: str, index: int, tokenizer: Any, text_of: Callable[[int], str | None]
    ) -> None:
        self.request, self.request_id, self.index = request, request_id, index
        self._text_of = text_of
        params = request.params
        self.text: TextStream | None = None
        if params.detokenize and tokenizer is not None and request.pooling is None:
            skip = params.skip_special_tokens
            self.text = TextStream(tokenizer, request.prompt, params.stop, skip_special_tokens=skip)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_kind: ErrorKind = "engine"
        self.rules: Rules | None = None
        self.guide: GuideState | None = None
        self.guide_beside = False  # it is told tokens later, except the last one that there may be
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.broken = ""  # why the engine cannot go on with it
        self.embedding: np.ndarray | None = None
        self.pooled: np.ndarray | None = None  # the sum of the prompt's tokens so far
        self._began = False
        self._new_text = ""
        self._new_tokens: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> int:
        """Append sampled tokens and return how many of them were accepted; tokens after the end are dropped.

        Sets `finish_reason` if the sequence ended.
        """
        params, generated = self.request.params, len(self.request.output)
        for number, token in enumerate(tokens):
            generated += 1
            self._new_tokens.append(token)
            if logprobs is not None:
                self._new_logprobs.append(logprobs[number])
            if token in self.request.stop_ids or token in params.stop_token_ids:
                self.stop_reason = token if token in params.stop_token_ids else None
                if params.include_stop_str_in_output:  # as in vLLM, of stop tokens too; special ones have no text
                    self._add_text(token, generated)
                self._end("stop")
                return number + 1
            self._add_text(token, generated)
            if self.text is not None and self.text.stopped:
                self._end("stop")
                return number + 1
            last = generated >= self.request.max_output
            if self.guide is not None and (last or not self.guide_beside):
                self._follow_guide(self.guide.advance([token]))
                if self.finished:
                    return number + 1
            if last:
                self._end("length")
                return number + 1
        return len(tokens)

    def take_followed(self) -> None:
        """Note what a guide beside says of the newest token; sets `finish_reason` if the sequence ended."""
        try:
            assert self.guide is not None
            self._follow_guide(self.guide.followed())
        except Exception as error:
            self.break_by(error)
            self.fail(self.broken)

    def break_by(self, error: Exception) -> None:
        """Note that the engine met an error that concerns this sequence alone, which then ends."""
        log.error("request %s failed", self.request_id, exc_info=error)
        self.text = None  # which may be what failed
        self.broken = f"this request met an error of the engine ({type(error).__name__}: {error}): report it."

    def fail(self, sentence: str, kind: ErrorKind = "engine") -> None:
        """End the sequence with an error; `kind` tells whether the engine or the request caused it."""
        self.error, self.error_kind = sentence, kind
        self._end("error")

    def end(self, reason: str) -> None:
        """End the sequence with the finish reason `reason`."""
        self._end(reason)

    @property
    def wants_prompt(self) -> bool:
        """Whether prompt log-probabilities or an embedding are requested."""
        return self.request.pooling is not None or self.request.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def delta(self) -> OutputDelta | None:
        """Return the output since the last call, or None if there is none."""
        if not (self._new_tokens or self._new_text or self.finished):
            return None
        request, first = self.request, not self._began
        self._began = True
        delta = OutputDelta(
            self.request_id,
            self.index,
            self._new_text,
            self._new_tokens,
            self._new_logprobs if request.params.logprobs is not None else None,
            self.finish_reason,
            self.stop_reason,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=request.cached,
            num_output_tokens=len(request.output),
            prompt_logprobs=self.prompt_logprobs if first else None,
            embedding=self.embedding,
            error=self.error,
            error_kind=self.error_kind,
        )
        self._new_text, self._new_tokens, self._new_logprobs = "", [], []
        return delta

    def logprobs_of(
        self, token: int, logprob: float, top_tokens: np.ndarray, top_logprobs: np.ndarray, count: int
    ) -> TokenLogprobs:
        """Return the log-probabilities of the chosen token and of the `count` most likely ones.

        Args:
            token: the chosen token. logprob: its log-probability.
            top_tokens: int32 [max_logprobs], most likely first.
            top_logprobs: float32 [max_logprobs].
            count: how many of the most likely tokens to include.
        """
        top = top_tokens.tolist()
        rank = top.index(token) + 1 if token in top else None
        found: TokenLogprobs = {token: Logprob(logprob, rank, self._text_of(token))}
        for place, (other, value) in enumerate(zip(top[:count], top_logprobs.tolist(), strict=False)):
            found.setdefault(other, Logprob(value, place + 1, self._text_of(other)))
        return found

    def add_prompt_logprobs(
        self,
        start: int,
        targets: Sequence[int],
        logprobs: np.ndarray,
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> None:
        """Store log-probabilities of the prompt tokens from position `start`; the first prompt token has none.

        Args:
            start: the position of the first target. targets: token ids.
            logprobs: float32 [targets].
            top_tokens, top_logprobs: [targets, max_logprobs], most likely first.
        """
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]
        count = self.request.params.prompt_logprobs or 0
        del self.prompt_logprobs[start:]  # a preempted prompt is read again
        for row, token in enumerate(targets):
            tops = top_tokens[row], top_logprobs[row]
            self.prompt_logprobs.append(self.logprobs_of(token, float(logprobs[row]), *tops, count))

    def _add_text(self, token: int, generated: int) -> None:
        """Add a token's text; sets `stop_reason` if a stop string ends in it."""
        if self.text is None:
            return
        params = self.request.params
        self.text.armed = generated >= params.min_tokens
        self._new_text += self.text.push(token)
        if self.text.stopped_by is not None:
            self.stop_reason = self.text.stopped_by
            if params.include_stop_str_in_output:
                self._new_text += self.text.stopped_by

    def _follow_guide(self, taken: int) -> None:
        guide = self.guide
        assert guide is not None
        if taken == 0:
            reason = guide.error or "the output left its grammar, which is an error of this engine: report it."
            self.fail(reason, guide.fault)
        elif guide.finished:
            self._end("stop")

    def _end(self, reason: str) -> None:
        if self.text is not None and not self.text.stopped:
            self._new_text += self.text.finish()
        self.finish_reason = reason
