"""The requests that have a slot. In: who comes, goes, and is in a step, and the tokens that steps gave; out: lists and
arrays by slot, so that a step of many requests costs a few array operations and one short loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.scheduler_output import ScheduledStep
from ttpu_serve.scheduling.waiting_queue import key_of


class RunningRequests:
    """Arrays are int32 [max_num_seqs] by slot and say the same as the requests themselves.

    computed, known, total: as in `Request`. left: tokens that may still be sampled.
    guessing: drafts are in flight, so that it is not known which token is next.
    generation: how often the slot was left; a step's row is void where it was left since.
    prefilling: requests with more than one token to compute, in order. decoding: the others, at `decode_slots`.
    slots: of all that run. These four are of the last `refresh`, and never changed in place.
    in_flight: steps whose tokens are not known yet.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.by_slot: list[Request | None] = [None] * max_num_seqs
        self.computed, self.known, self.total, self.left = np.zeros((4, max_num_seqs), np.int32)
        self.guessing = np.zeros(max_num_seqs, np.bool_)
        self.generation = np.zeros(max_num_seqs, np.int64)
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.decode_slots = self.slots = np.zeros(0, np.int32)
        self.in_flight = 0
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._changed = False

    def __len__(self) -> int:
        return len(self.by_slot) - len(self._free)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self.by_slot if request is not None)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def last(self) -> Request:
        """Who is last in the order."""
        return max(self, key=key_of)

    def enter(self, request: Request) -> None:
        """Gives a request a slot; `has_room` was looked at."""
        request.slot = self._free.pop()
        request.status = Status.RUNNING
        self.by_slot[request.slot] = request
        self.settle(request)
        self._changed = True

    def leave(self, request: Request) -> None:
        """Takes its slot back."""
        self.generation[request.slot] += 1
        self.by_slot[request.slot] = None
        self._free.append(request.slot)
        request.slot = -1
        request.draft = []
        self._changed = True

    def refresh(self) -> None:
        """Brings the lists up to date, after somebody came, went, or went on with its prompt."""
        if not self._changed:
            return
        running = list(self)
        self.slots = np.array([request.slot for request in running], np.int32)
        prompts = self.total[self.slots] - self.computed[self.slots] > 1
        self.prefilling = sorted((running[row] for row in prompts.nonzero()[0].tolist()), key=key_of)
        self.decoding = [running[row] for row in (~prompts).nonzero()[0].tolist()]
        self.decode_slots = self.slots[~prompts]
        self._changed = False

    def dispatch(self, step: ScheduledStep) -> None:
        """Counts what the step computes as computed, and what it samples as pending."""
        slots, ends = step.slots, step.starts + step.counts
        self.computed[slots] = ends
        self.total[slots] += step.samples
        self.left[slots] -= step.samples
        if step.drafts is not None:
            self.guessing[slots] = [bool(draft) for draft in step.drafts]
        for request, end, sampled in zip(step.requests, ends.tolist(), step.samples.tolist(), strict=True):
            request.computed = end
            if sampled:
                request.pending += 1
        self.in_flight += 1
        self._changed |= step.num_decodes < len(step.requests)

    def settle(self, request: Request) -> None:
        """Makes the arrays agree with a running request, of which the newest token at least is left to compute."""
        slot, remaining = request.slot, request.max_output - len(request.output)
        if request.pooling:
            remaining = int(request.computed < len(request.prompt))
        else:
            request.computed = min(request.computed, request.total - 1)
        self.guessing[slot] = False
        self.known[slot] = request.known
        self.total[slot] = request.total
        self.computed[slot] = request.computed
        self.left[slot] = remaining - request.pending

    def update(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> None:
        """`Scheduler.update` of a step with drafts."""
        self.in_flight -= 1
        given = np.array([len(row) for row in tokens], np.int32)
        usual = step.samples & (given > 0) & (self.generation[step.slots] == step.generations)
        for row in (step.samples & ~usual).nonzero()[0].tolist():
            self._take(step, row, tokens[row])
        rows = usual.nonzero()[0]
        slots, more = step.slots[rows], given[rows] - 1
        self.known[slots] += more + 1
        self.total[slots] += more
        self.left[slots] -= more
        self.guessing[slots] = False
        # The newest token is computed next: what was computed of drafts that did not hold is void.
        self.computed[slots] = computed = np.minimum(self.computed[slots], self.total[slots] - 1)
        for row, end in zip(rows.tolist(), computed.tolist(), strict=True):
            request = step.requests[row]
            request.output.extend(tokens[row])
            request.pending -= 1
            request.computed = end

    def update_single(self, step: ScheduledStep, tokens: np.ndarray) -> None:
        """`Scheduler.update_single` of a step without drafts."""
        self.in_flight -= 1
        usual = step.samples & (tokens >= 0) & (self.generation[step.slots] == step.generations)
        requests, slots = step.requests, step.slots
        if not usual.all():
            for row in (step.samples & ~usual).nonzero()[0].tolist():
                self._take(step, row, [] if tokens[row] < 0 else [int(tokens[row])])
            requests, slots = [requests[row] for row in usual.nonzero()[0].tolist()], slots[usual]
            tokens = tokens[usual]
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output.append(token)
            request.pending -= 1
        self.known[slots] += 1

    def _take(self, step: ScheduledStep, row: int, tokens: Sequence[int]) -> None:
        """Tokens, or none, of one row that gave none or has left its slot."""
        request = step.requests[row]
        if request.status is not Status.FINISHED:
            request.output.extend(tokens)
            request.pending -= 1
            if self.generation[step.slots[row]] == step.generations[row]:
                self.settle(request)
