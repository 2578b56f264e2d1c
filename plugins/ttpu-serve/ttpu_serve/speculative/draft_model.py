"""Drafts by a smaller model with the same vocabulary. It applies each request's sampling parameters and noise to its
logits, so that it predicts the token that will be sampled, not only the most likely one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.execution.step_builder import StepBuilder
from ttpu_serve.runner import InFlight, ModelRunner
from ttpu_serve.scheduling.block_table import BlockTables, page_groups
from ttpu_serve.scheduling.request import Request
from ttpu_serve.scheduling.scheduler_output import ScheduledStep


@dataclass(slots=True, eq=False)
class _Followed:
    """The draft model's state of a request. `mirror` shares the request's token lists and has the parameters that
    change probabilities. Keys of the first `computed` tokens are cached, and after them those of `drafted`, which were
    drafts when they were computed."""

    request: Request
    mirror: Request
    slot: int
    computed: int = 0
    drafted: list[int] = field(default_factory=list)
    round: int = 0  # when it was asked for last


class DraftModelProposer:
    """Runs a draft model a few tokens ahead of each request, with KV pages of its own.

    A round is one step over the tokens that the model has not seen (one or two; for a new request, part of its prompt),
    then one step per further draft token. Tokens stay on the device between steps, and the host waits once. If slots or
    pages run out, the least recently drafted requests are dropped, or the request gets no draft.
    """

    wants_hidden = False

    def __init__(self, runner: ModelRunner, vocab_size: int | None = None) -> None:
        """`runner` has its pages allocated and serves no other engine; `vocab_size` is the larger model's."""
        self.runner = runner
        limits = runner.limits
        self._steps_for = StepBuilder(runner)
        self._length, self._budget, self._own_vocab = (
            limits.max_model_len, limits.max_num_batched_tokens, limits.vocab_size,
        )  # fmt: skip
        self._vocab = min(vocab_size or self._own_vocab, self._own_vocab)
        self.pages = BlockTables(page_groups(runner), limits.max_num_seqs, self._length, limits.page_size)
        self._followed: dict[str, _Followed] = {}
        self._free = list(range(limits.max_num_seqs - 1, -1, -1))
        self._round = 0

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Return up to `k` draft tokens per request."""
        self._round += 1
        depths = {}
        rows: list[_Followed] = []
        for request in requests:
            depth = min(k, request.max_output - len(request.output) - 1, self._length - request.known + 1)
            followed = self._follow(request) if depth > 0 else None
            if followed is not None:
                rows.append(followed)
                depths[followed.slot] = depth
        begun = self._catch_up(rows, depths)
        drafts = self._draft(begun, depths) if begun else {}
        return [drafts.get(request.id, []) for request in requests]

    def on_finish(self, request: Request) -> None:
        """Release the request's slot and pages."""
        followed = self._followed.get(request.id)
        if followed is not None:
            self._forget(followed)

    def observe(self, requests: Sequence[Request], hidden: np.ndarray) -> None:
        """Ignore `hidden`, [requests, hidden]: this proposer does not use the larger model's states."""

    def sleep(self) -> None:
        """Move the weights to the host and drop the KV cache."""
        self._forget_all()
        self.runner.sleep()
        self._steps_for.reset()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self.runner.wake_up()

    def close(self) -> None:
        """Free the KV cache's memory."""
        self._forget_all()
        self.runner.release()

    # -- who is followed --

    def _follow(self, request: Request) -> _Followed | None:
        """Return the request's state, with `computed` advanced over accepted drafts, or None if there is no slot or the
        request contains tokens that the draft model lacks."""
        followed = self._followed.get(request.id)
        if followed is not None and followed.request is not request:
            self._forget(followed)
            followed = None
        if followed is None:
            if not self._free:
                self._make_room()
            if not self._free:
                return None
            followed = _Followed(request, _mirror(request), self._free.pop())
            self._followed[request.id] = followed
            self.pages.admit(followed.slot, (), 0)
        followed.round = self._round
        came = request.tokens(followed.computed, followed.computed + len(followed.drafted))
        for guess, token in zip(followed.drafted, came, strict=False):
            if guess != token:
                break
            followed.computed += 1
        followed.drafted = []
        new = request.tokens(followed.computed, request.known)
        return followed if max(new, default=0) < self._own_vocab else None

    def _make_room(self) -> None:
        """Drop the least recently drafted request that is not drafted now."""
        idle = [each for each in self._followed.values() if each.round < self._round]
        if idle:
            self._forget(min(idle, key=lambda each: each.round))

    def _forget(self, followed: _Followed) -> None:
        del self._followed[followed.request.id]
        self.pages.release(followed.slot)
        self._free.append(followed.slot)

    def _forget_all(self) -> None:
        for followed in list(self._followed.values()):
            self._forget(followed)

    def _has_pages(self, followed: _Followed, tokens: int) -> bool:
        """Allocate pages for `tokens` positions, dropping other requests if needed; return whether that succeeded."""
        while self.pages.capacity(followed.slot) < tokens:
            before = len(self._free)
            self._make_room()
            if len(self._free) == before:
                return False
        self.pages.extend(followed.slot, tokens)
        return True

    # -- steps --

    def _catch_up(self, rows: Sequence[_Followed], depths: dict[int, int]) -> list[tuple[_Followed, InFlight, int]]:
        """Run one step over known but uncomputed tokens, fewest first. Return the requests that are then up to date,
        each with the step and the row of its first draft token."""
        budget, chosen, counts = self._budget, [], []
        for followed in sorted(rows, key=lambda each: each.request.known - each.computed):
            missing = followed.request.known - followed.computed
            count = min(missing, budget)
            ahead = depths[followed.slot] - 1 if count == missing else 0
            if count == 0 or not self._has_pages(followed, followed.computed + count + ahead):
                continue
            chosen.append(followed)
            counts.append(count)
            budget -= count
        if not chosen:
            return []
        starts = [followed.computed for followed in chosen]
        samples = [
            start + count == each.request.known for each, start, count in zip(chosen, starts, counts, strict=True)
        ]
        # What was sampled last in these slots were guesses; the newest tokens are the host's.
        self._steps_for.forget_sampled(np.array([followed.slot for followed in chosen]))
        done = self._step(chosen, starts, counts, samples)
        for followed, start, count in zip(chosen, starts, counts, strict=True):
            followed.computed = start + count
        return [(each, done, row) for row, each in enumerate(chosen) if samples[row]]

    def _draft(
        self, rows: Sequence[tuple[_Followed, InFlight, int]], depths: dict[int, int]
    ) -> dict[str, list[int]]:
        """Run one step per further draft token over the requests that want more, then read all tokens."""
        steps = [rows]
        for ahead in range(1, max(depths[followed.slot] for followed, _, _ in rows)):
            going = [followed for followed, _, _ in steps[-1] if depths[followed.slot] > ahead]
            starts = [followed.computed + ahead - 1 for followed in going]
            done = self._step(going, starts, [1] * len(going), [True] * len(going))
            steps.append([(followed, done, row) for row, followed in enumerate(going)])
        read: dict[int, np.ndarray] = {}
        guesses: dict[str, list[int]] = {followed.request.id: [] for followed, _, _ in rows}
        for step in steps:
            for followed, done, row in step:
                if id(done) not in read:
                    read[id(done)] = done.read().token
                guesses[followed.request.id].append(int(read[id(done)][row]))
        for followed, _, _ in rows:
            # The last guess was not computed on, only made.
            followed.drafted = guesses[followed.request.id][:-1]
        return {name: self._usable(tokens) for name, tokens in guesses.items()}

    def _usable(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first one that is invalid or that the larger model lacks."""
        wrong = (place for place, token in enumerate(tokens) if not 0 <= token < self._vocab)
        return tokens[: next(wrong, len(tokens))]

    def _step(
        self, rows: Sequence[_Followed], starts: Sequence[int], counts: Sequence[int], samples: Sequence[bool]
    ) -> InFlight:
        slots, begins = np.array([each.slot for each in rows], np.int32), np.array(starts, np.int32)
        self.pages.trim(slots, np.array([each.computed for each in rows], np.int32))
        step = ScheduledStep(
            requests=[each.mirror for each in rows],
            starts=begins,
            counts=np.array(counts, np.int32),
            samples=np.array(samples, np.bool_),
            slots=slots,
            drafts=None,
            num_tokens=sum(counts),
            num_decodes=counts.count(1),
            generations=np.zeros(len(rows), np.int64),
        )
        return self._steps_for.dispatch(step, self.pages.tables)[1]


def _mirror(request: Request) -> Request:
    params = request.params
    own = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=params.seed
    )
    return Request(request.id, request.prompt, own, output=request.output, max_output=request.max_output)
