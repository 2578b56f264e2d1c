"""Chunked prefill: divides a step's token budget among running and waiting prompts, admits requests, and allocates
pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ttpu_serve.scheduling.block_table import BlockTables
from ttpu_serve.scheduling.prefix_cache import PrefixCache
from ttpu_serve.scheduling.request import Request, Status
from ttpu_serve.scheduling.running_queue import RunningRequests
from ttpu_serve.scheduling.scheduler_output import SchedulerConfig
from ttpu_serve.scheduling.waiting_queue import WaitingQueue, scheduling_of

_MOST_PASSED_OVER = 32  # waiting requests that one step looks past, so that a long queue costs no more
_LOOKED_UP_AGAIN = 16  # steps after which a request that found too few pages looks whether its prefix is cached by now


@dataclass(slots=True)
class PromptPart:
    """`count` tokens of a request from position `start`; `left` tokens would complete its prompt."""

    request: Request
    start: int
    left: int
    count: int = 0


class Prefill:
    """Plans the prompt tokens of a step: first running prompts, then waiting ones, each in order. A request is not
    overtaken because it lacks pages.

    While other prompts wait behind it, a prompt of more than half a step's tokens takes at most half of the budget, and
    any budget that the others leave.

    Args:
        config: settings of the scheduler.
        pages: the block tables.
        running: the requests with a slot.
        waiting: the requests without a slot.
        prefixes: the prefix cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: BlockTables,
        running: RunningRequests,
        waiting: WaitingQueue,
        prefixes: PrefixCache,
    ) -> None:
        self._config, self._pages, self._running = config, pages, running
        self._waiting, self._prefixes = waiting, prefixes
        self._plans = 0

    def headroom(self) -> list[int]:
        """Return the pages per group that new requests must leave for running ones, at least one each, to avoid
        preemption."""
        running = len(self._running)
        totals = self._pages.pages_total
        return [max(math.ceil(self._config.watermark * total), running) if running else 0 for total in totals]

    def plan(self, budget: int, busy: bool, admit: bool, make_room: Callable[[Request], None]) -> list[PromptPart]:
        """Return prompt parts for up to `budget` tokens, with pages.

        Args:
            budget: tokens of the step that are left.
            busy: the step also decodes.
            admit: whether waiting requests may be given slots.
            make_room: preempts requests, possibly the given one, until it has a page for its next token.
        """
        self._plans += 1
        parts: list[PromptPart] = []
        prompts = [request for request in self._running.prefilling if request.status is Status.RUNNING]
        for index, request in enumerate(prompts):
            if budget < 1 or len(parts) == self._most_parts:
                return parts
            start = request.computed
            self._pages.trim(np.array([request.slot]), np.array([start]))
            if not busy and not parts and not self._running.in_flight:
                make_room(request)  # nobody else will give pages back
            if request.status is not Status.RUNNING:
                return parts
            part = PromptPart(request, start, request.total - start)
            behind = index + 1 < len(prompts) or (len(self._waiting) > 0 and self._running.has_room)
            budget -= self._grant(part, self._share(part, budget, behind))
            if part.count:
                parts.append(part)
        if admit:
            budget = self._admit(parts, budget, busy)
        for part in parts:
            budget -= self._grant(part, budget)
        return parts

    @property
    def _most_parts(self) -> int:
        return self._config.max_prefills or self._config.max_num_seqs

    def _share(self, part: PromptPart, budget: int, behind: bool) -> int:
        """Return the tokens that a part may have before the parts behind it."""
        long = part.left > self._config.max_num_batched_tokens // 2
        if not (behind and long and self._config.enable_chunked_prefill):
            return budget
        return max(budget // 2, min(budget, self._config.page_size))

    def _grant(self, part: PromptPart, budget: int) -> int:
        """Add up to `budget` tokens to a part, as far as pages allow; return how many."""
        slot, size, before = part.request.slot, self._config.page_size, part.count
        if before == part.left or budget < 1:
            return 0
        room = self._pages.capacity(slot, self.headroom()) - part.start
        if room < 1:  # as little as helps: what runs would be preempted for more
            room = min(self._pages.capacity(slot) - part.start, size)
        count = min(part.left, before + budget, room)
        if count < part.left:  # whole pages can be found in the cache sooner
            whole = (part.start + count) // size * size - part.start
            count = whole if whole > before or before else count
        if count <= before:
            return 0
        self._pages.extend(slot, part.start + count)
        part.count = count
        return count - before

    def _admit(self, parts: list[PromptPart], budget: int, busy: bool) -> int:
        """Give slots, pages and tokens to waiting requests; return the remaining budget."""
        admitted: list[Request] = []
        passed = 0
        for request in self._waiting:
            if budget < 1 or len(parts) == self._most_parts or not self._running.has_room:
                break
            if passed == _MOST_PASSED_OVER:
                break
            if request.pending or len(request.output) >= request.max_output:
                passed += 1  # its tokens are not all known yet, or it ends as soon as they are looked at
                continue
            found = self._found(request)
            if found is None:
                passed += 1
                continue
            if found < 0 or not self._enter(request, found, budget, busy or bool(parts)):
                break
            admitted.append(request)
            part = PromptPart(request, request.computed, request.total - request.computed)
            behind = self._running.has_room and len(self._waiting) > len(admitted)
            budget -= self._grant(part, self._share(part, budget, behind))
            parts.append(part)
        for request in admitted:
            self._waiting.remove(request)
        return budget

    def _found(self, request: Request) -> int | None:
        """Return `PrefixCache.find`, or -1 if there are too few pages, as in earlier steps. The result spares the
        expensive lookup of long prompts."""
        short = scheduling_of(request).short_of
        if short is not None and self._plans % _LOOKED_UP_AGAIN:
            now = (pool.available for pool in self._pages.pools)
            if all(pages <= before for pages, before in zip(now, short, strict=True)):
                return -1
        return self._prefixes.find(request)

    def _enter(self, request: Request, found: int, budget: int, busy: bool) -> bool:
        """Give a waiting request a slot and its first pages if it can run at once."""
        size, whole = self._config.page_size, not self._config.enable_chunked_prefill
        left = request.known - found * size
        if left > budget and (whole or (busy and budget < size)):
            return False
        hashes = self._prefixes.hashes(request, found)
        if not self._pages.fits(hashes, request.known, self.headroom(), whole):
            scheduling_of(request).short_of = tuple(pool.available for pool in self._pages.pools)
            return False
        scheduling_of(request).short_of = None
        self._prefixes.enter(request, found)
        self._running.enter(request)
        self._pages.admit(request.slot, hashes, request.known)
        return True
