"""The requests that have a slot, as lists and as arrays by slot, so that a step of many requests costs few array
operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.scheduler_output import ScheduledStep
from ttpu_serve.scheduling.waiting_queue import key_of


class RunningRequests:
    """Running requests. Arrays are int32 [max_num_seqs] by slot and mirror the requests' fields.

    computed, known, total: as in `Request`. left: tokens that may still be sampled.
    guessing: whether drafts are in flight, so that the next position is unknown.
    held: whether the request sits out, because what its next token may be is not known yet.
    generation: how often the slot was vacated; rows of steps with an older generation are void.
    prefilling: requests with more than one token to compute, in order. decoding: the others, at `decode_slots`. slots:
    slots of all running requests. These four are set by `refresh` and never changed in place.
    in_flight: dispatched steps whose tokens are not known yet.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.by_slot: list[Request | None] = [None] * max_num_seqs
        self.computed, self.known, self.total, self.left = np.zeros((4, max_num_seqs), np.int32)
        self.guessing, self.held = np.zeros((2, max_num_seqs), np.bool_)
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
        """The last request in the order of service."""
        return max(self, key=key_of)

    def enter(self, request: Request) -> None:
        """Give a request a slot. The caller has checked `has_room`."""
        request.slot = self._free.pop()
        request.status = Status.RUNNING
        self.by_slot[request.slot] = request
        self.held[request.slot] = False
        self.settle(request)
        self._changed = True

    def leave(self, request: Request) -> None:
        """Take back the request's slot."""
        self.generation[request.slot] += 1
        self.by_slot[request.slot] = None
        self.held[request.slot] = False
        self._free.append(request.slot)
        request.slot = -1
        request.draft = []
        self._changed = True

    def refresh(self) -> None:
        """Update the lists after requests entered, left, or continued their prompts."""
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
        """Count the step's tokens as computed and its samples as pending."""
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
        """Make the arrays agree with a running request, of which at least the newest token is left to compute."""
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
        """Apply `Scheduler.update` to a step with drafts."""
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
        """Apply `Scheduler.update_single` to a step without drafts; `tokens` is an integer array [n]."""
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
        """Apply the tokens of one row that sampled none or whose slot was vacated."""
        request = step.requests[row]
        if request.status is not Status.FINISHED:
            request.output.extend(tokens)
            request.pending -= 1
            if self.generation[step.slots[row]] == step.generations[row]:
                self.settle(request)
