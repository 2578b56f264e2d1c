"""The scheduler chooses the tokens of each step. It turns requests and the tokens of earlier steps into
`ScheduledStep`s with slots and block tables, on the host alone.

The caller dispatches every step before it schedules the next, and passes the tokens of steps to `update` in the same
order. It may schedule the next step before it has these tokens: tokens of a dispatched step count as written, because
the device works in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.execution.errors import QueueFullError
from ttpu_serve.scheduling.block_table import BlockTables, PageGroup
from ttpu_serve.scheduling.prefill import Prefill, PromptPart
from ttpu_serve.scheduling.prefix_cache import PrefixCache
from ttpu_serve.scheduling.request import Request, SchedulingState, Status
from ttpu_serve.scheduling.running_queue import RunningRequests
from ttpu_serve.scheduling.scheduler_output import ScheduledStep, SchedulerConfig, SchedulerStats
from ttpu_serve.scheduling.waiting_queue import WaitingQueue, key_of, place, scheduling_of

__all__ = ["PageGroup", "ScheduledStep", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Continuous batching under a token budget.

    A step holds every decoding request, then parts of running prompts, then waiting prompts, in the order of
    `waiting_queue.place`. While other prompts wait, one long prompt takes at most half of the budget. When pages run
    out, the running request that is last in the order is preempted: it waits again with its tokens and is recomputed.
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[PageGroup]) -> None:
        self.config, self._groups = config, tuple(groups)
        self.preemptions_total = 0
        self._requests: dict[str, Request] = {}
        self._added = 0
        self._begin()

    def _begin(self) -> None:
        """Make the state of nothing waiting, running or cached."""
        config = self.config
        self.pages = BlockTables(self._groups, config.max_num_seqs, config.max_model_len, config.page_size)
        self._waiting = WaitingQueue()
        self._running = RunningRequests(config.max_num_seqs)
        self._prefixes = PrefixCache(self.pages, self._running, config.caches_prefixes)
        self._prefill = Prefill(config, self.pages, self._running, self._waiting, self._prefixes)

    # counts

    @property
    def waiting(self) -> int:
        """Requests without a slot, including preempted ones."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The block tables, per group int32 [max_num_seqs, pages_per_seq]."""
        return self.pages.tables

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages per group that running requests hold."""
        return self.pages.pages_in_use

    @property
    def pages_total(self) -> tuple[int, ...]:
        """Pages per group that requests can hold."""
        return self.pages.pages_total

    @property
    def prefix_query_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache."""
        return self._prefixes.query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self._prefixes.hit_tokens

    def stats(self) -> SchedulerStats:
        """Return all counters."""
        return SchedulerStats(
            waiting=self.waiting,
            running=self.running,
            preemptions=self.preemptions_total,
            pages_in_use=self.pages.pages_in_use,
            pages_cached=self.pages.pages_cached,
            pages_total=self.pages.pages_total,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
        )

    # requests come and go

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            QueueFullError: `max_waiting` requests wait, beyond those for which slots are free.
            RequestError: the request could never be served, or its id is in use.
        """
        config = self.config
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use by a request that runs or waits: choose another.")
        prompt, added = len(request.prompt), 0 if request.pooling else request.max_output
        if not prompt:
            raise RequestError("this request has a prompt of no tokens: give it one or more.")
        if request.max_output < 1:
            raise RequestError(f"this request may add {request.max_output} tokens: it must be 1 or more.")
        if prompt + added > config.max_model_len:
            raise RequestError(
                f"this request has {prompt} prompt tokens and may add {added}, but the context holds "
                f"{config.max_model_len}: shorten the prompt or lower max_tokens."
            )
        limit = prompt + max(added - 1, 0)
        for index, group in enumerate(self.pages.groups):
            needed = self.pages.blocks_needed(index, limit, not config.enable_chunked_prefill)
            if needed > group.num_pages - 1:
                raise RequestError(
                    f"this request has {prompt} prompt tokens and may add {added}, which takes {needed} "
                    f"pages of group {group.name!r}, but there are {group.num_pages - 1} of {config.page_size} tokens: "
                    "shorten the prompt, lower max_tokens, or give the cache more memory."
                )
        waiting = len(self._waiting) - (config.max_num_seqs - len(self._running))  # others start with the next step
        if config.max_waiting is not None and waiting >= config.max_waiting:
            raise QueueFullError(
                f"this request came while {waiting} requests wait for a place, but at most {config.max_waiting} may "
                "(max_waiting): send it again later."
            )
        looks_up = config.caches_prefixes and request.findable
        request.scheduling = SchedulingState(place(request, self._added, config.aging_seconds), looks_up)
        request.status = Status.WAITING
        self._added += 1
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any time and return it, or None if the id is unknown."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str) -> None:
        """End a request. Its slot and pages can be reused at once, because steps in flight write before later ones.
        Finished requests are ignored."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.id]
        request.status = Status.FINISHED
        request.finish_reason = reason

    def hold(self, request: Request) -> None:
        """Leave a running request out of steps until `release`, or until it runs anew."""
        if request.status is Status.RUNNING:
            self._running.held[request.slot] = True

    def release(self, request: Request) -> None:
        """Let a request take part in steps again."""
        if request.status is Status.RUNNING:
            self._running.held[request.slot] = False

    def preempt_all(self) -> None:
        """Preempt all running requests, before pages lose their content or weights change. They are recomputed from
        their tokens."""
        for request in list(self._running):
            self._preempt(request)

    def restart(self, requests: Iterable[Request]) -> None:
        """Let these of the requests that were added wait again, to be recomputed from their tokens, and forget the
        others, all cached prefixes and all steps in flight. Use it after an error, which may have left keys and values
        unwritten that count as computed, or half of a change to the scheduler's own state."""
        counted = self._prefixes.query_tokens, self._prefixes.hit_tokens
        kept = {request.id: request for request in requests}
        for request in self._requests.values():
            if kept.get(request.id) is not request:
                request.status, request.finish_reason = Status.FINISHED, "error"
        self._requests = kept
        self._begin()
        self._prefixes.query_tokens, self._prefixes.hit_tokens = counted
        for request in kept.values():
            if request.status is Status.RUNNING:
                request.preemptions += 1
                self.preemptions_total += 1
            request.status, request.slot, request.draft = Status.WAITING, -1, []
            request.pending = request.computed = 0
            scheduling_of(request).short_of = None
            self._waiting.add(request)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; running requests keep their pages."""
        self.pages.reset_prefix_cache()

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = Status.WAITING
        request.computed = 0
        request.preemptions += 1
        self.preemptions_total += 1
        self._waiting.add(request)

    def _leave(self, request: Request) -> None:
        self._prefixes.leave(request)
        self.pages.release(request.slot)
        self._running.leave(request)

    # the step

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, or None if nothing can run now."""
        self._running.refresh()
        self._prefixes.register_full_pages()
        preempted = self.preemptions_total
        decodes, slots, starts = self._decodes()
        budget = self.config.max_num_batched_tokens - len(decodes)
        drafts = self._drafts(decodes, slots, starts, budget) if self.config.lookahead else None
        if drafts is not None:
            budget -= sum(map(len, drafts))
        parts: list[PromptPart] = []
        if self._running.prefilling or len(self._waiting):
            admit = self.preemptions_total == preempted
            busy = bool(decodes) or bool(self._running.held.any())
            parts = self._prefill.plan(budget, busy, admit, self._make_room)
        if not decodes and not parts:
            return None
        step = self._step(decodes, slots, starts, drafts, parts)
        self._running.dispatch(step)
        return step

    def _decodes(self) -> tuple[list[Request], np.ndarray, np.ndarray]:
        """Return the requests with one known or pending token left to compute, their slots [n] and positions [n]; pages
        are allocated."""
        running = self._running
        requests, slots = running.decoding, running.decode_slots
        ready = (running.left[slots] > 0) & ~running.held[slots]
        if self.config.lookahead:
            ready &= ~running.guessing[slots]
        if not ready.all():
            requests, slots = [requests[row] for row in ready.nonzero()[0].tolist()], slots[ready]
        starts = running.computed[slots]
        self.pages.trim(slots, starts)
        lacking = self.pages.lacking(slots, starts)
        if len(lacking):
            if not any(pool.available < len(lacking) for pool in self.pages.pools):
                self.pages.extend_by_one(slots[lacking], starts[lacking])
            elif self._make_pages([requests[row] for row in lacking.tolist()]):
                kept = np.array([request.status is Status.RUNNING for request in requests])
                requests = [request for request in requests if request.status is Status.RUNNING]
                slots, starts = slots[kept], starts[kept]
        return requests, slots, starts

    def _make_pages(self, requests: list[Request]) -> bool:
        """Give each request a page for its next token, preempting others if needed; return whether any request was
        preempted."""
        preempted = self.preemptions_total
        for request in sorted(requests, key=key_of):
            self._make_room(request)
            if request.status is Status.RUNNING:
                self.pages.extend(request.slot, request.computed + 1)
        return self.preemptions_total > preempted

    def _make_room(self, request: Request) -> None:
        """Preempt the last requests in the order, finally the request itself, until its next token has a page."""
        while request.status is Status.RUNNING and self.pages.capacity(request.slot) <= request.computed:
            self._preempt(self._running.last())

    def _drafts(
        self, requests: list[Request], slots: np.ndarray, starts: np.ndarray, budget: int
    ) -> list[list[int]] | None:
        """Return the drafts to verify, with pages; they take at most half of the budget while prompts wait."""
        lookahead = self.config.lookahead
        budget = budget // 2 if self._running.prefilling or len(self._waiting) else budget
        wanted = np.array([0 if request.pending else len(request.draft) for request in requests], np.int32)
        counts = np.minimum(wanted, np.minimum(self._running.left[slots] - 1, lookahead))
        counts = np.clip(budget - (np.cumsum(counts) - counts), 0, counts)
        if counts.any():
            headroom = self._prefill.headroom()
            rows = self.pages.lacking(slots, starts + counts)
            free = (pool.available - spare for pool, spare in zip(self.pages.pools, headroom, strict=True))
            if lookahead <= self.config.page_size and len(rows) <= min(free, default=0):
                self.pages.extend_by_one(slots[rows], (starts + counts)[rows])
                rows = rows[:0]
            for row in rows.tolist():
                slot, start = int(slots[row]), int(starts[row])
                counts[row] = min(int(counts[row]), self.pages.capacity(slot, headroom) - start - 1)
                self.pages.extend(slot, start + 1 + int(counts[row]))
        drafts = [request.draft[:count] for request, count in zip(requests, counts.tolist(), strict=True)]
        for request in requests:
            request.draft = []
        return drafts if counts.any() else None

    def _step(
        self,
        requests: list[Request],
        slots: np.ndarray,
        starts: np.ndarray,
        drafts: list[list[int]] | None,
        parts: list[PromptPart],
    ) -> ScheduledStep:
        decodes = len(requests)
        counts = np.ones(decodes, np.int32)
        samples = np.ones(decodes, np.bool_)
        if drafts is not None:
            counts += np.array([len(draft) for draft in drafts], np.int32)
        if parts:
            parts.sort(key=lambda part: part.left > 1)  # with one token left to compute, it only decodes
            decodes += sum(part.left == 1 for part in parts)
            requests = requests + [part.request for part in parts]
            slots = np.concatenate([slots, np.array([part.request.slot for part in parts], np.int32)])
            starts = np.concatenate([starts, np.array([part.start for part in parts], np.int32)])
            counts = np.concatenate([counts, np.array([part.count for part in parts], np.int32)])
            samples = np.concatenate([samples, np.array([part.count == part.left for part in parts])])
            drafts = None if drafts is None else drafts + [[] for _ in parts]
        return ScheduledStep(
            requests=requests,
            starts=starts,
            counts=counts,
            samples=samples,
            slots=slots,
            drafts=drafts,
            num_tokens=int(counts.sum()),
            num_decodes=decodes,
            generations=self._running.generation[slots],
        )

    # results

    def update(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> None:
        """Apply a step's tokens: per row none, one, or the accepted draft tokens and one more.

        A row that does not sample has none. Tokens of finished requests are dropped; those of preempted ones are kept.
        Update steps in the order in which they were scheduled.

        Raises:
            ValueError: the number of rows differs from the step's.
        """
        if len(tokens) != len(step.requests):
            raise ValueError(f"tokens of {len(tokens)} rows were given for {len(step.requests)}: give a list for each.")
        if step.drafts is None:
            self._running.update_single(step, np.array([row[0] if len(row) else -1 for row in tokens], np.int64))
        else:
            self._running.update(step, tokens)

    def update_single(self, step: ScheduledStep, tokens: np.ndarray) -> None:
        """Apply one token per row: `tokens` is an integer array [n], negative for none. Otherwise as `update`.

        Raises:
            ValueError: the number of tokens differs from the step's rows.
        """
        if len(tokens) != len(step.requests):
            raise ValueError(f"{len(tokens)} tokens were given for {len(step.requests)} rows: give one for each.")
        if step.drafts is None:
            self._running.update_single(step, tokens)
        else:
            self._running.update(step, [[token] if token >= 0 else [] for token in tokens.tolist()])
