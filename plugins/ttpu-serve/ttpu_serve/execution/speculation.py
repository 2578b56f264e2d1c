"""Speculative decoding in the engine's loop: it requests drafts before a step and counts accepted tokens after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.runner import InFlight
from ttpu_serve.scheduling.request import Status
from ttpu_serve.scheduling.scheduler_output import ScheduledStep
from ttpu_serve.speculative.proposer import Proposer


class Speculation:
    """A proposer and the counts of its drafts. Without a proposer it does nothing.

    drafted, accepted: numbers of tokens. accepted_at: accepted tokens by position in the draft.
    """

    def __init__(self, proposer: Proposer | None = None, draft_tokens: int = 0) -> None:
        """`draft_tokens`: maximum draft tokens per request and step."""
        self.proposer, self.draft_tokens = proposer, draft_tokens
        self.drafted = self.accepted = 0
        self.accepted_at = [0] * draft_tokens

    @property
    def wants_hidden(self) -> bool:
        """Whether the proposer reads the model's hidden states."""
        return self.proposer is not None and self.proposer.wants_hidden

    def propose(self, outputs: Iterable[SequenceOutput]) -> None:
        """Request drafts for the sequences that can have them."""
        if self.proposer is None:
            return
        ready = [output for output in outputs if _speculates(output)]
        if not ready:
            return
        drafts = self.proposer.propose([output.request for output in ready], self.draft_tokens)
        for output, draft in zip(ready, drafts, strict=True):
            if draft and output.guide is not None:
                draft = draft[: output.guide.legal_prefix(draft)]
            output.request.draft = list(draft)

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
        self.proposer.observe([scheduled.requests[index] for index in sampled], done.read_hidden()[places])


def _speculates(output: SequenceOutput) -> bool:
    """Whether drafts of a request can be verified: penalties change with every token, and incomplete prompts need no
    drafts."""
    request = output.request
    decodes = request.status is Status.RUNNING and request.pending == 0 and request.computed == request.known - 1
    return decodes and not request.params.has_penalties and request.pooling is None
