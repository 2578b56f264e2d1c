"""Converts a scheduled step into a `RunnerStep`: token ids, rows whose logits are needed, block tables, and requests
that take their slots. The result refers to no object of the engine, so that it can be sent to other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ttpu_serve.execution.sampling_level import level_of
from ttpu_serve.runner import IN_FLIGHT, InFlight, ModelRunner, RowRules, RunnerStep, SlotStart
from ttpu_serve.scheduling.request import Request
from ttpu_serve.scheduling.scheduler_output import ScheduledStep


class StepBuilder:
    """Builds and dispatches the runner's steps. It tracks which request owns each slot and which slots hold their last
    sampled token on the device."""

    def __init__(self, runner: ModelRunner) -> None:
        limits = runner.limits
        self._runner, self._penalties = runner, limits.penalties
        self._owners: list[Request | None] = [None] * limits.max_num_seqs
        self._sampled = np.zeros(limits.max_num_seqs, np.bool_)

    def dispatch(
        self,
        scheduled: ScheduledStep,
        tables: Sequence[np.ndarray],
        rules: Mapping[tuple[int, int], RowRules] | None = None,
        *,
        hidden: bool = False,
    ) -> tuple[RunnerStep, InFlight]:
        """Send a step to the runner and return at once.

        Args:
            scheduled: the scheduler's step.
            tables: per page group int32 [max_num_seqs, pages], by slot.
            rules: (index of the request in the step, draft position) → rules of that row's token.
            hidden: keep the residual stream of the step's tokens.
        """
        slots = scheduled.slots
        new = [
            index
            for index, (request, slot) in enumerate(zip(scheduled.requests, slots.tolist(), strict=True))
            if self._owners[slot] is not request
        ]
        tokens, rows, owners = self._tokens_and_rows(scheduled, new)
        step = RunnerStep(
            slots=slots,
            starts=scheduled.starts,
            counts=scheduled.counts,
            tokens=tokens,
            samples=scheduled.samples,
            rows=rows,
            owners=owners,
            tables=tuple(table[slots] for table in tables),
            begins=tuple(self._start_of(scheduled.requests[index], int(slots[index])) for index in new),
            rules=_by_row(rules, owners) if rules else {},
            hidden=hidden,
        )
        in_flight = self._runner.dispatch(step)
        # Only now: a step that could not be dispatched begins nothing and samples nothing.
        for index in new:
            self._owners[int(slots[index])] = scheduled.requests[index]
        single = scheduled.samples
        if scheduled.drafts is not None:
            single = single & np.array([not draft for draft in scheduled.drafts])
        self._sampled[slots] = single
        return step, in_flight

    def forget_sampled(self, slots: np.ndarray) -> None:
        """Mark `slots`, int32 [n], as not holding their newest token on the device. Used after drafts, whose tokens may
        have been rejected."""
        self._sampled[slots] = False

    def reset(self) -> None:
        """Forget all slots, after the runner lost its state."""
        self._owners = [None] * len(self._owners)
        self._sampled[:] = False

    def _start_of(self, request: Request, slot: int) -> SlotStart:
        prompt = output = None
        if self._penalties and request.params.has_penalties:
            prompt, output = np.array(request.prompt, np.int32), np.array(request.output, np.int32)
        return SlotStart(
            slot, request.params, level_of(request.params), len(request.prompt), request.adapter, prompt, output
        )

    def _tokens_and_rows(
        self, scheduled: ScheduledStep, new: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the step's tokens [tokens], the rows [rows] whose logits are needed, and the sequence of each row
        [rows]."""
        ends = np.cumsum(scheduled.counts)
        tokens = np.full(int(ends[-1]), IN_FLIGHT, np.int32)
        drafts = scheduled.drafts
        on_device = (scheduled.counts == 1) & scheduled.samples & self._sampled[scheduled.slots]
        on_device[list(new)] = False
        for index in np.flatnonzero(~on_device).tolist():
            request, start = scheduled.requests[index], int(scheduled.starts[index])
            count, end = int(scheduled.counts[index]), int(ends[index])
            draft = drafts[index] if drafts else []
            known = request.tokens(start, start + count - len(draft))
            tokens[end - count : end] = known + draft if draft else known
        if not drafts or not any(drafts):
            return tokens, (ends - 1).astype(np.int32), np.arange(len(scheduled.requests), dtype=np.int32)
        owners = np.repeat(np.arange(len(scheduled.requests), dtype=np.int32), [1 + len(draft) for draft in drafts])
        rows = [np.arange(end - 1 - len(draft), end) for end, draft in zip(ends.tolist(), drafts, strict=True)]
        return tokens, np.concatenate(rows).astype(np.int32), owners


def _by_row(rules: Mapping[tuple[int, int], RowRules], owners: np.ndarray) -> dict[int, RowRules]:
    first = np.searchsorted(owners, np.arange(int(owners[-1]) + 1)).tolist()
    return {first[index] + place: rule for (index, place), rule in rules.items()}
