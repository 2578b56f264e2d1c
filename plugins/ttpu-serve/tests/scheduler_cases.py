"""A loop around the scheduler and the null device, and what must hold after each of its steps. In: requests; out: their
tokens, or an AssertionError that names the promise that was broken."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from null_device import NullDevice, answer_alone

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.runner import NULL_PAGE
from ttpu_serve.scheduling.block_table import PageGroup
from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerConfig

FULL = PageGroup("full", 40)


def settings(**changes: Any) -> SchedulerConfig:
    """Small ones."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "page_size": 4, "watermark": 0.0}
    return SchedulerConfig(**{**values, **changes})


def request(
    name: str, prompt: int | Sequence[int], output: int = 4, limit: int | None = None, **changes: Any
) -> Request:
    """A request whose prompt has that many tokens, which no other one has, or those tokens."""
    if isinstance(prompt, int):
        prompt = [1000 + abs(hash((len(name), *map(ord, name), index))) % 10_000 for index in range(prompt)]
    params = changes.pop("params", None) or SamplingParams(max_tokens=output)
    return Request(name, list(prompt), params, max_output=output if limit is None else limit, **changes)


class Loop:
    """What the engine core does, with `depth` steps dispatched before the tokens of the first are looked at; the token
    `stop` ends an answer."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[PageGroup] = (FULL,),
        depth: int = 0,
        stop: int | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, groups)
        self.device = NullDevice(self.scheduler, groups)
        self.groups, self.depth, self.stop = tuple(groups), depth, stop
        self.in_flight: deque[tuple[ScheduledStep, list[list[int]]]] = deque()
        self.finished: dict[str, Request] = {}
        self.steps: list[ScheduledStep] = []

    def add(self, *requests: Request) -> None:
        for added in requests:
            self.scheduler.add(added)

    def step(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        check(self.scheduler)
        if step is not None:
            check_step(self.scheduler, step)
            self.in_flight.append((step, self.device.run(step)))
            self.steps.append(step)
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.collect()
        return step

    def collect(self) -> None:
        step, tokens = self.in_flight.popleft()
        for given in tokens:
            if self.stop in given:  # what was guessed beyond the end does not count
                del given[given.index(self.stop) + 1 :]
        self.scheduler.update(step, tokens)
        for row in step.requests:
            if row.status is not Status.FINISHED:
                self._end(row)
        check(self.scheduler)

    def _end(self, row: Request) -> None:
        if row.output and row.output[-1] == self.stop:
            self.scheduler.finish(row, "stop")
        elif len(row.output) == row.max_output or (row.pooling and row.computed == len(row.prompt)):
            self.scheduler.finish(row, "length")
        if row.status is Status.FINISHED:
            self.finished[row.id] = row

    def run(self, limit: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not unfinished(self.scheduler) and not self.in_flight:
                return
            in_flight = len(self.in_flight)
            assert self.step() is not None or in_flight, "requests are left, but nothing can run: a livelock"
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def assert_answers(self) -> None:
        """Every finished request has the tokens that it would have had alone."""
        for done in self.finished.values():
            if not done.pooling:
                answer = answer_alone(self.groups, done, done.max_output)
                end = answer.index(self.stop) + 1 if self.stop in answer else None
                assert done.output == answer[:end]


def unfinished(scheduler: Scheduler) -> int:
    """The number of requests that run or wait."""
    return scheduler.running + scheduler.waiting


def check(scheduler: Scheduler) -> None:
    """Pages are counted right and shared only where that is meant; the arrays say what the requests say."""
    slots = scheduler._running
    running = list(slots)
    size = scheduler.config.page_size
    for pool, table in zip(scheduler.pages.pools, scheduler.tables, strict=True):
        entries = Counter(table[table != NULL_PAGE].tolist())
        assert all(pool.refs[page] == entries.get(page, 0) for page in range(pool.num_pages))
        idle, free = set(pool._idle), set(pool._free)
        assert len(free) == len(pool._free) and not idle & free and not (idle | free) & set(entries)
        assert idle | free | set(entries) == set(range(1, pool.num_pages))
        assert pool.in_use == len(entries)
        assert {page: digest for page, digest in enumerate(pool._hashes) if digest} == {
            page: digest for digest, page in pool.cached.items()
        }
        assert idle <= set(pool.cached.values())
        for page, count in entries.items():
            if count > 1:
                rows, places = np.nonzero(table == page)
                holders = [held for held in running if held.slot in rows]
                place = int(places[0])
                assert set(places.tolist()) == {place} and len(holders) == count
                assert all(min(held.computed, held.known) >= (place + 1) * size for held in holders)
                prefixes = {(held.salt, *held.tokens(0, (place + 1) * size)) for held in holders}
                assert len(prefixes) == 1, "requests with different prefixes share a page"
    assert len(running) == scheduler.running == len({held.slot for held in running})
    for held in running:
        assert held.status is Status.RUNNING and slots.by_slot[held.slot] is held
        assert slots.computed[held.slot] == held.computed
        assert slots.known[held.slot] == held.known and slots.total[held.slot] == held.total
        assert held.pooling or slots.left[held.slot] == held.max_output - len(held.output) - held.pending >= 0
    assert all(held.slot == -1 and held.computed == 0 for held in scheduler._waiting)


def check_step(scheduler: Scheduler, step: ScheduledStep) -> None:
    """A step keeps to the budget and to its own description."""
    config, rows = scheduler.config, len(step.requests)
    assert 0 < rows == len(step.starts) == len(step.counts) == len(step.samples) == len(step.slots)
    assert len(set(step.slots.tolist())) == rows <= config.max_num_seqs
    assert (step.counts > 0).all() and step.num_tokens == step.counts.sum() <= config.max_num_batched_tokens
    guesses = np.array([len(draft) for draft in step.drafts]) if step.drafts else np.zeros(rows, int)
    assert (guesses <= config.lookahead).all()
    assert ((step.counts - guesses)[: step.num_decodes] == 1).all() and step.samples[: step.num_decodes].all()
    assert not guesses[step.num_decodes :].any()
    assert config.max_prefills is None or rows - step.num_decodes <= config.max_prefills
    for row, slot, start, count in zip(step.requests, step.slots, step.starts, step.counts, strict=True):
        assert row.slot == slot and row.computed == start + count
        for group, table in zip(scheduler.pages.groups, scheduler.tables, strict=True):
            first = max(group.first_seen(int(start)), 0) // config.page_size
            needed = table[slot, first : -(-(start + count) // config.page_size)]
            assert (needed != NULL_PAGE).all(), f"group {group.name} lacks a page"


def shake(loop: Loop, seed: int, operations: int, prefixes: int = 3) -> None:
    """Random requests, aborts, preemptions, resets, drafts and steps; then runs dry."""
    choose = random.Random(seed)
    limit = loop.scheduler.config.max_model_len
    stems = [[choose.randrange(50) for _ in range(limit)] for _ in range(prefixes)]
    alive: list[Request] = []
    for number in range(operations):
        alive = [held for held in alive if held.status is not Status.FINISHED]
        what = choose.random()
        if what < 0.2 and len(alive) < 12:
            stem = choose.choice(stems)
            prompt = stem[: choose.randint(1, limit // 2)] + [50 + choose.randrange(3)] * choose.randint(0, 4)
            added = request(
                f"{number}",
                prompt,
                choose.randint(1, limit - len(prompt)) if choose.random() < 0.3 else choose.randint(1, 8),
                priority=choose.randint(-1, 1),
                arrival=float(number),
                salt=choose.choice([b"", b"", b"salt"]),
                pooling=choose.choice([None] * 6 + ["last", "mean"]),
            )
            if added.pooling:
                added.max_output = 1
            loop.add(added)
            alive.append(added)
        elif what < 0.23 and alive:
            aborted = choose.choice(alive)
            assert loop.scheduler.abort(aborted.id) is aborted
            check(loop.scheduler)
        elif what < 0.235:
            loop.scheduler.preempt_all()
            check(loop.scheduler)
        elif what < 0.24:
            loop.scheduler.reset_prefix_cache()
            check(loop.scheduler)
        else:
            for held in alive:
                if loop.scheduler.config.lookahead and choose.random() < 0.5 and held.status is Status.RUNNING:
                    held.draft = guess(loop, held, choose)
            loop.step()
    loop.run(20_000)


def guess(loop: Loop, held: Request, choose: random.Random) -> list[int]:
    """A draft, of which a random part is right."""
    answer = answer_alone(loop.groups, held, len(held.output) + 5)[len(held.output) :]
    right = choose.randint(0, 5)
    return [token if place < right else choose.randrange(50) for place, token in enumerate(answer)]
