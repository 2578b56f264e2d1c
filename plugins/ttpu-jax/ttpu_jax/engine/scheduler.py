"""Which tokens the next step computes. In: requests, and the tokens that steps gave; out: `ScheduledStep`s, with slots
and block tables for them. No arrays of the device are touched here.

The caller dispatches every step before it asks for the next one, and hands their tokens to `update` in the same order,
but may ask for the next before it has them: what a dispatched step will write counts as written, since the device
works in order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_jax.engine.errors import QueueFullError
from ttpu_jax.engine.pages import PageGroup, PageTables, extend_hashes
from ttpu_jax.engine.request import Request, Status
from ttpu_jax.engine.schedule import ScheduledStep, SchedulerConfig, SchedulerStats
from ttpu_jax.engine.waiting import Book, Claims, WaitingQueue, book_of, key_of, place

_MOST_PASSED_OVER = 32  # waiting requests that one step looks past, so that a long queue costs no more
_MOST_REGISTERED = 32  # requests whose full pages one step makes known: many fill a page at once, the rest can wait

__all__ = ["PageGroup", "ScheduledStep", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class _Part:
    """A part of a prompt in the step being made."""

    __slots__ = ("count", "request", "start", "total")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.start = request.computed
        self.total = request.total
        self.count = 0


class Scheduler:
    """Continuous batching under a token budget.

    A step holds every decoding request, then parts of the prompts that run, then prompts that were waiting, in the
    order of `waiting.place`. Who comes first may take all of the budget but half, while others are behind him: a long
    prompt delays short ones little, and not the reverse. When pages run out, whoever runs and is last in the order
    goes back to waiting with its tokens, to be computed again.
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[PageGroup]) -> None:
        self.config = config
        self.pages = PageTables(groups, config.max_num_seqs, config.max_model_len, config.page_size)
        self.preemptions_total = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._claims = Claims()
        self._added = 0
        self._in_flight = 0  # steps without tokens yet
        self._steps = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        # What the hot path needs of each running request, by slot; the same numbers as the requests' own.
        self._by_slot: list[Request | None] = [None] * config.max_num_seqs
        self._computed, self._total, self._known, self._left = np.zeros((4, config.max_num_seqs), np.int32)
        self._guessing = np.zeros(config.max_num_seqs, np.bool_)  # drafts are in flight: what is next is not known
        self._generation = np.zeros(config.max_num_seqs, np.int64)
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._decode_slots = np.zeros(0, np.int32)
        self._run_slots = np.zeros(0, np.int32)
        self._changed = False

    # counts

    @property
    def waiting(self) -> int:
        """Requests that have no slot, preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return self.config.max_num_seqs - len(self._free_slots)

    @property
    def has_requests(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """`PageTables.tables`."""
        return self.pages.tables

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages that running requests hold, per group."""
        return self.pages.pages_in_use

    @property
    def pages_total(self) -> tuple[int, ...]:
        """Pages that requests can hold, per group."""
        return self.pages.pages_total

    def stats(self) -> SchedulerStats:
        """All counters."""
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
        """Queues a new request.

        Raises QueueFullError where `max_waiting` requests wait, RequestError where it could never be served."""
        config = self.config
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use by a request that runs or waits: choose another.")
        prompt, added = len(request.prompt), 0 if request.pooling else request.max_output
        if not prompt:
            raise RequestError(f"request {request.id!r} has a prompt of no tokens: give it one or more.")
        if request.max_output < 1:
            raise RequestError(f"request {request.id!r} may add {request.max_output} tokens: it must be 1 or more.")
        if prompt + added > config.max_model_len:
            raise RequestError(
                f"request {request.id!r} has {prompt} prompt tokens and may add {added}, but the context holds "
                f"{config.max_model_len}: shorten the prompt or lower max_tokens."
            )
        limit = prompt + max(added - 1, 0)
        for index, group in enumerate(self.pages.groups):
            needed = self.pages.blocks_needed(index, limit, not config.enable_chunked_prefill)
            if needed > group.num_pages - 1:
                raise RequestError(
                    f"request {request.id!r} has {prompt} prompt tokens and may add {added}, which takes {needed} "
                    f"pages of group {group.name!r}, but there are {group.num_pages - 1} of {config.page_size} tokens: "
                    "shorten the prompt, lower max_tokens, or give the cache more memory."
                )
        if config.max_waiting is not None and len(self._waiting) >= config.max_waiting:
            raise QueueFullError(
                f"request {request.id!r} came while {len(self._waiting)} requests wait, but at most "
                f"{config.max_waiting} may (max_waiting): send it again later."
            )
        looks_up = config.caches_prefixes and request.params.prompt_logprobs is None and request.pooling != "mean"
        request.book = Book(place(request, self._added, config.aging_seconds), looks_up)
        request.status = Status.WAITING
        self._added += 1
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any time and returns it; None where there is none of that id."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request; its slot and pages can be used at once, since a step in flight writes before a later one.
        Does nothing where it has ended."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.id]
        request.status = Status.FINISHED
        request.finish_reason = reason

    def preempt_all(self) -> None:
        """Sends every running request back to waiting, to be computed again from its tokens: before the pages lose
        their content, or the weights change."""
        for request in self._running():
            self._preempt(request)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; requests that run keep their pages."""
        self.pages.reset_prefix_cache()

    def _running(self) -> list[Request]:
        return [request for request in self._by_slot if request is not None]

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = Status.WAITING
        request.computed = 0
        request.preemptions += 1
        self.preemptions_total += 1
        self._waiting.add(request)

    def _leave(self, request: Request) -> None:
        slot = request.slot
        if self.config.caches_prefixes:
            self._register(request, min(request.known, request.computed) // self.config.page_size)
        self._claims.drop(request, book_of(request).hashes[int(self.pages.registered[slot]) :])
        self.pages.release(slot)
        self._generation[slot] += 1
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        request.slot = -1
        request.draft = []
        self._changed = True

    # the step

    def schedule(self) -> ScheduledStep | None:
        """The next step; None where nothing can run before a step in flight is updated, or at all."""
        self._refresh()
        self._register_full_pages()
        preempted = self.preemptions_total
        decodes, slots, starts = self._decodes()
        budget = self.config.max_num_batched_tokens - len(decodes)
        drafts = self._drafts(decodes, slots, starts, budget) if self.config.lookahead else None
        if drafts is not None:
            budget -= sum(map(len, drafts))
        parts: list[_Part] = []
        if self._prefilling or len(self._waiting):
            parts = self._parts(budget, bool(decodes), self.preemptions_total == preempted)
        if not decodes and not parts:
            return None
        return self._commit(decodes, slots, starts, drafts, parts)

    def _refresh(self) -> None:
        """Lists of who runs, after somebody came, went, or went on with its prompt. Never changed in place."""
        if not self._changed:
            return
        running = self._running()
        slots = np.array([request.slot for request in running], np.int32)
        prompts = self._total[slots] - self._computed[slots] > 1
        self._prefilling = sorted((running[row] for row in prompts.nonzero()[0].tolist()), key=key_of)
        decoding = ~prompts
        self._decoding = [running[row] for row in decoding.nonzero()[0].tolist()]
        self._decode_slots = slots[decoding]
        self._run_slots = slots
        self._changed = False

    def _register_full_pages(self) -> None:
        if not self.config.caches_prefixes:
            return
        slots = self._run_slots
        full = np.minimum(self._known[slots], self._computed[slots]) // self.config.page_size
        behind = full - self.pages.registered[slots]
        rows = behind.nonzero()[0]
        if len(rows) > _MOST_REGISTERED:
            rows = rows[np.argsort(-behind[rows], kind="stable")[:_MOST_REGISTERED]]
        singles: list[Request] = []
        for slot, pages, missing in zip(slots[rows].tolist(), full[rows].tolist(), behind[rows].tolist(), strict=True):
            request = self._by_slot[slot]
            assert request is not None
            if missing == 1:
                extend_hashes(book_of(request).hashes, request, pages, self.config.page_size)
                singles.append(request)
            else:
                self._register(request, pages)
        if singles:
            rows = rows[behind[rows] == 1]
            digests = [book_of(r).hashes[page - 1] for r, page in zip(singles, full[rows].tolist(), strict=True)]
            self.pages.register_next(slots[rows], digests)
            for request, digest in zip(singles, digests, strict=True):
                self._claims.drop(request, (digest,))

    def _register(self, request: Request, full: int) -> None:
        hashes = book_of(request).hashes
        before = int(self.pages.registered[request.slot])
        extend_hashes(hashes, request, full, self.config.page_size)
        self.pages.register(request.slot, hashes, full)
        self._claims.drop(request, hashes[before:full])

    def _decodes(self) -> tuple[list[Request], np.ndarray, np.ndarray]:
        """Requests with one known or pending token left to compute, their slots, and its positions; pages are there."""
        requests, slots = self._decoding, self._decode_slots
        ready = self._left[slots] > 0
        if self.config.lookahead:
            ready &= ~self._guessing[slots]
        if not ready.all():
            requests, slots = [requests[row] for row in ready.nonzero()[0].tolist()], slots[ready]
        starts = self._computed[slots]
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
        """A page for the next token of each, where not all can have one: whoever is last in the order makes room.
        Returns whether somebody had to."""
        preempted = self.preemptions_total
        for request in sorted(requests, key=key_of):
            self._make_room(request)
            if request.status is Status.RUNNING:
                self.pages.extend(request.slot, request.computed + 1)
        return self.preemptions_total > preempted

    def _make_room(self, request: Request) -> None:
        """Preempts until there is a page for the request's next token, or it was the last itself."""
        while request.status is Status.RUNNING and self.pages.capacity(request.slot) <= request.computed:
            self._preempt(max(self._running(), key=key_of))

    def _headroom(self) -> list[int]:
        """Pages per group that new work leaves for what runs already: without them, it would soon be preempted."""
        running = self.running
        return [max(math.ceil(self.config.watermark * total), running) if running else 0 for total in self.pages_total]

    def _drafts(
        self, requests: list[Request], slots: np.ndarray, starts: np.ndarray, budget: int
    ) -> list[list[int]] | None:
        """The drafts that are tried, with pages for them; at most half of the budget while prompts want it."""
        budget = budget // 2 if self._prefilling or len(self._waiting) else budget
        wanted = np.array([0 if request.pending else len(request.draft) for request in requests], np.int32)
        counts = np.minimum(wanted, np.minimum(self._left[slots] - 1, self.config.lookahead))
        counts = np.clip(budget - (np.cumsum(counts) - counts), 0, counts)
        if counts.any():
            headroom = self._headroom()
            rows = self.pages.lacking(slots, starts + counts)
            free = (pool.available - spare for pool, spare in zip(self.pages.pools, headroom, strict=True))
            if self.config.lookahead <= self.config.page_size and len(rows) <= min(free, default=0):
                self.pages.extend_by_one(slots[rows], (starts + counts)[rows])
                rows = rows[:0]
            for row in rows.tolist():
                slot, start = int(slots[row]), int(starts[row])
                room = self.pages.capacity(slot, headroom) - start - 1
                counts[row] = min(int(counts[row]), room)
                self.pages.extend(slot, start + 1 + int(counts[row]))
        drafts = [request.draft[:count] for request, count in zip(requests, counts.tolist(), strict=True)]
        for request in requests:
            request.draft = []
        return drafts if counts.any() else None

    # prompts

    def _parts(self, budget: int, busy: bool, admit: bool) -> list[_Part]:
        """Parts of prompts for `budget` tokens; new ones only if `admit`. busy: the step has decoding requests."""
        parts: list[_Part] = []
        running = [request for request in self._prefilling if request.status is Status.RUNNING]
        most = self.config.max_prefills or self.config.max_num_seqs
        for index, request in enumerate(running):
            if budget < 1 or len(parts) == most:
                return parts
            behind = index + 1 < len(running) or bool(len(self._waiting) and self._free_slots)
            part = _Part(request)
            self.pages.trim(np.array([request.slot]), np.array([part.start]))
            if not busy and not parts and not self._in_flight:
                self._make_room(request)  # nobody else will give pages back
            if request.status is Status.RUNNING:
                budget -= self._grant(part, self._share(part, budget, behind))
            if part.count:
                parts.append(part)
            else:
                admit = False  # it waits for pages, which newcomers must not take
        if admit:
            budget = self._admit(parts, budget, busy, most)
        for part in parts:
            budget -= self._grant(part, budget)
        return parts

    def _share(self, part: _Part, budget: int, behind: bool) -> int:
        """Tokens of the budget that a prompt may take before those behind it had theirs."""
        long = part.total - part.start > self.config.max_num_batched_tokens // 2
        if not (behind and long and self.config.enable_chunked_prefill):
            return budget
        return max(budget // 2, min(budget, self.config.page_size))

    def _grant(self, part: _Part, budget: int) -> int:
        """Adds up to `budget` tokens to a part, with pages for them; returns how many."""
        slot, before = part.request.slot, part.count
        room = self.pages.capacity(slot, self._headroom()) - part.start
        if room < 1:
            room = min(self.pages.capacity(slot) - part.start, self.config.page_size)
        count = min(part.total - part.start, before + budget, room)
        if part.start + count < part.total:  # whole pages can be found in the cache sooner
            whole = (part.start + count) // self.config.page_size * self.config.page_size - part.start
            count = whole if whole > before else count
        if count <= before:
            return 0
        self.pages.extend(slot, part.start + count)
        part.count = count
        return count - before

    def _admit(self, parts: list[_Part], budget: int, busy: bool, most: int) -> int:
        """Gives slots, pages and tokens to waiting requests, in order; returns what is left of the budget."""
        admitted: list[Request] = []
        passed = 0
        for request in self._waiting:
            if budget < 1 or len(parts) == most or not self._free_slots or passed == _MOST_PASSED_OVER:
                break
            if request.pending or len(request.output) >= request.max_output:
                passed += 1  # its tokens are not all known yet, or it ends as soon as they are looked at
                continue
            matched = self._match(request, budget, busy or bool(parts))
            if matched is None:
                break
            if matched < 0:
                passed += 1
                continue
            self._enter(request, matched)
            admitted.append(request)
            part = _Part(request)
            behind = bool(self._free_slots) and len(self._waiting) > len(admitted)
            budget -= self._grant(part, self._share(part, budget, behind))
            parts.append(part)
        for request in admitted:
            self._waiting.remove(request)
        return budget

    def _match(self, request: Request, budget: int, busy: bool) -> int | None:
        """Cached pages that a waiting request would begin with; -1 where it is better off later, since another one is
        computing its prefix, and None where it, and all behind it, must wait for pages or tokens."""
        book, size, pools = book_of(request), self.config.page_size, self.pages.pools
        available = tuple(pool.available for pool in pools)
        # Looking up a long prompt again is dear, and in vain while no pages were given back.
        again = book.short_of is None or any(now > then for now, then in zip(available, book.short_of, strict=True))
        if busy and not again and self._steps % 16:
            return None
        matched, hashes = 0, book.hashes
        if book.looks_up:
            extend_hashes(hashes, request, (request.known - 1) // size, size)
            matched = self.pages.match(hashes)
            shared = self._claims.shared(hashes, matched)
            if shared * size * 2 >= request.known - matched * size:
                return -1
        remaining = request.known - matched * size
        chunked = self.config.enable_chunked_prefill
        if remaining > budget and (not chunked or (busy and budget < size)):
            return None
        if not self.pages.fits(hashes[:matched], request.known, self._headroom(), not chunked):
            book.short_of = available
            return None
        return matched

    def _enter(self, request: Request, matched: int) -> None:
        book, size, slot = book_of(request), self.config.page_size, self._free_slots.pop()
        book.short_of = None
        self.pages.admit(slot, book.hashes[:matched], request.known)
        if book.looks_up:
            self._claims.claim(request, book.hashes[matched:])
            if not request.preemptions:
                self.prefix_query_tokens += len(request.prompt)
                self.prefix_hit_tokens += min(matched * size, len(request.prompt))
        request.status = Status.RUNNING
        request.slot = slot
        request.computed = matched * size
        request.cached = min(matched * size, len(request.prompt))
        self._by_slot[slot] = request
        self._settle(request)
        self._changed = True

    # results

    def _commit(
        self,
        requests: list[Request],
        slots: np.ndarray,
        starts: np.ndarray,
        drafts: list[list[int]] | None,
        parts: list[_Part],
    ) -> ScheduledStep:
        counts = np.ones(len(requests), np.int32)
        if drafts is not None:
            counts += np.array([len(draft) for draft in drafts], np.int32)
            self._guessing[slots] = counts > 1
        samples = np.ones(len(requests), np.bool_)
        decodes = len(requests)
        if parts:
            parts.sort(key=lambda part: part.total - part.start > 1)  # one token left to compute: it only decodes
            decodes += sum(part.total - part.start == 1 for part in parts)
            requests = requests + [part.request for part in parts]
            slots = np.concatenate([slots, np.array([part.request.slot for part in parts], np.int32)])
            starts = np.concatenate([starts, np.array([part.start for part in parts], np.int32)])
            counts = np.concatenate([counts, np.array([part.count for part in parts], np.int32)])
            samples = np.concatenate([samples, np.array([part.start + part.count == part.total for part in parts])])
            drafts = None if drafts is None else drafts + [[] for _ in parts]
            self._changed = True
        ends = starts + counts
        self._computed[slots] = ends
        self._total[slots] += samples
        self._left[slots] -= samples
        for request, end, sampled in zip(requests, ends.tolist(), samples.tolist(), strict=True):
            request.computed = end
            if sampled:
                request.pending += 1
        self._in_flight += 1
        self._steps += 1
        return ScheduledStep(
            requests=requests,
            starts=starts,
            counts=counts,
            samples=samples,
            slots=slots,
            drafts=drafts,
            num_tokens=int(counts.sum()),
            num_decodes=decodes,
            generations=self._generation[slots],
        )

    def update(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> None:
        """Takes the tokens that a step gave each row: one, or those of its drafts that held and one more, or none.

        A row that does not sample gets none. Tokens of requests that ended meanwhile are dropped; those of preempted
        ones are kept. Steps are updated in the order in which they were scheduled."""
        if step.drafts is None:
            self.update_single(step, np.array([row[0] if len(row) else -1 for row in tokens], np.int64))
            return
        self._in_flight -= 1
        given = np.array([len(row) for row in tokens], np.int32)
        usual = step.samples & (given > 0) & (self._generation[step.slots] == step.generations)
        for row in (step.samples & ~usual).nonzero()[0].tolist():
            self._take(step, row, tokens[row])
        rows = usual.nonzero()[0]
        slots, more = step.slots[rows], given[rows] - 1
        self._known[slots] += more + 1
        self._total[slots] += more
        self._left[slots] -= more
        self._guessing[slots] = False
        # Its newest token is computed next: what was computed of drafts that did not hold is void.
        self._computed[slots] = computed = np.minimum(self._computed[slots], self._total[slots] - 1)
        for row, end in zip(rows.tolist(), computed.tolist(), strict=True):
            request = step.requests[row]
            request.output.extend(tokens[row])
            request.pending -= 1
            request.computed = end

    def update_single(self, step: ScheduledStep, tokens: np.ndarray) -> None:
        """`update` where no row has drafts: one token per row, negative for none."""
        if len(tokens) != len(step.requests):
            raise ValueError(f"{len(tokens)} tokens were given for {len(step.requests)} rows: give one for each.")
        if step.drafts is not None:
            self.update(step, [[token] if token >= 0 else [] for token in tokens.tolist()])
            return
        self._in_flight -= 1
        usual = step.samples & (tokens >= 0) & (self._generation[step.slots] == step.generations)
        requests, slots = step.requests, step.slots
        if not usual.all():
            for row in (step.samples & ~usual).nonzero()[0].tolist():
                self._take(step, row, [] if tokens[row] < 0 else [int(tokens[row])])
            requests, slots = [requests[row] for row in usual.nonzero()[0].tolist()], slots[usual]
            tokens = tokens[usual]
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output.append(token)
            request.pending -= 1
        self._known[slots] += 1

    def _take(self, step: ScheduledStep, row: int, tokens: Sequence[int]) -> None:
        """Tokens, or none, for one row that may have left its slot."""
        request = step.requests[row]
        if request.status is not Status.FINISHED:
            request.output.extend(tokens)
            request.pending -= 1
            if self._generation[step.slots[row]] == step.generations[row]:
                self._settle(request)

    def _settle(self, request: Request) -> None:
        """Makes the arrays agree with a running request, of which the newest token at least is left to compute."""
        slot = request.slot
        if not request.pooling:
            request.computed = min(request.computed, request.total - 1)
        self._guessing[slot] = False
        self._known[slot] = request.known
        self._total[slot] = request.total
        self._computed[slot] = request.computed
        answers = 1 if request.pooling else request.max_output
        done = answers if request.pooling and request.computed == len(request.prompt) else len(request.output)
        self._left[slot] = answers - done - request.pending
