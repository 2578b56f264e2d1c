"""Speculative decoding in the engine's loop: it requests drafts before a step and counts accepted tokens after it. An
error of the proposer costs drafts and no request."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.runner import InFlight
from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.scheduler_output import ScheduledStep
from ttpu_serve.speculative.proposer import Proposer

log = logging.getLogger("ttpu.engine")
MOST_FAILURES = 3
"""Times that a proposer may fail one after another before it is asked no more."""


class Speculation:
    """A proposer and the counts of its drafts. Without a proposer it does nothing.

    drafted, accepted: numbers of tokens. accepted_at: accepted tokens by position in the draft.
    """

    def __init__(self, proposer: Proposer | None = None, draft_tokens: int = 0) -> None:
        """`draft_tokens`: maximum draft tokens per request and step."""
        self.proposer, self.draft_tokens = proposer, draft_tokens
        self.drafted = self.accepted = 0
        self.accepted_at = [0] * draft_tokens
        self._failures = 0

    @property
    def wants_hidden(self) -> bool:
        """Whether the proposer reads the model's hidden states."""
        return self.proposer is not None and self.proposer.wants_hidden

    def propose(self, outputs: Iterable[SequenceOutput]) -> None:
        """Request drafts for the sequences that can have them."""
        if self.proposer is None or self._failures > MOST_FAILURES:
            return
        ready = [output for output in outputs if _speculates(output)]
        if not ready:
            return
        try:
            drafts = self.proposer.propose([output.request for output in ready], self.draft_tokens)
            self._failures = 0
        except Exception:
            self._note_failure(output.request for output in ready)
            return
        for output, draft in zip(ready, drafts, strict=True):
            try:
                if draft and output.guide is not None:
                    draft = draft[: output.guide.legal_prefix(draft)]
                output.request.draft = list(draft)
            except Exception as error:
                output.break_by(error)

    def count(self, drafted: int, accepted: int) -> None:
        """Count the drafted and accepted tokens of one request."""
        self.drafted += drafted
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1

    def observe(self, scheduled: ScheduledStep, done: InFlight, kept: Sequence[Sequence[int]]) -> None:
        """Pass the proposer the hidden states from which each request's newest token was drawn. `kept` holds each
        request's accepted tokens."""
        sampled = [index for index, tokens in enumerate(kept) if tokens]
        if not sampled or self.proposer is None:
            return
        ends = np.cumsum(scheduled.counts)
        drafts = scheduled.drafts or [[] for _ in kept]
        places = [int(ends[index]) - 1 - len(drafts[index]) + len(kept[index]) - 1 for index in sampled]
        requests = [scheduled.requests[index] for index in sampled]
        try:
            self.proposer.observe(requests, done.read_hidden()[places])
        except Exception:
            self._note_failure(requests)

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop what the proposer keeps of requests that ended or are computed again."""
        if self.proposer is None:
            return
        for request in requests:
            try:
                self.proposer.on_finish(request)
            except Exception:
                log.exception("the proposer of drafts failed to forget a request")

    def _note_failure(self, requests: Iterable[Request]) -> None:
        self._failures += 1
        off = "; it is asked no more" if self._failures > MOST_FAILURES else ""
        log.exception("the proposer of drafts failed%s", off)
        self.forget(requests)


def _speculates(output: SequenceOutput) -> bool:
    """Whether drafts of a request can be verified: penalties change with every token, and incomplete prompts need no
    drafts."""
    request = output.request
    decodes = request.status is Status.RUNNING and request.pending == 0 and request.computed == request.known - 1
    return decodes and not request.params.has_penalties and request.pooling is None
