"""The prefix cache: finds a request's first pages that another request has computed or is computing, and the hashes of
full pages."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from ttpu_serve.scheduling.block_table import BlockTables
from ttpu_serve.scheduling.request import Request
from ttpu_serve.scheduling.running_queue import RunningRequests
from ttpu_serve.scheduling.waiting_queue import scheduling_of

_DIGEST_BYTES = 16
_MOST_REGISTERED = 32  # requests whose full pages one step makes known: many fill a page at once, the rest can wait


def extend_hashes(hashes: list[bytes], request: Request, pages: int, page_size: int) -> None:
    """Extend `hashes` to the request's first `pages` full pages, whose tokens are all known.

    A page's hash is the blake2b of its parent's hash and its token ids; the root's parent is the request's salt. Equal
    hashes mean equal tokens from the beginning and an equal salt.
    """
    start, width = len(hashes) * page_size, page_size * 8
    if pages * page_size <= start:
        return
    tokens = array("q", request.tokens(start, pages * page_size)).tobytes()
    parent = hashes[-1] if hashes else b"root" + request.salt
    for offset in range(0, len(tokens), width):
        parent = hashlib.blake2b(parent + tokens[offset : offset + width], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


class PrefixCache:
    """The prefix cache as requests see it. If it is off, nothing is found.

    query_tokens, hit_tokens: prompt tokens looked up and found when their request first ran.
    """

    def __init__(self, pages: BlockTables, running: RunningRequests, enabled: bool) -> None:
        self.enabled = enabled
        self.query_tokens = 0
        self.hit_tokens = 0
        self._pages, self._running = pages, running
        self._claims: dict[bytes, Request] = {}  # pages that a running prompt is the first to compute

    def find(self, request: Request) -> int | None:
        """Return the number of cached pages with which a waiting request would begin, leaving at least one token to
        compute. Return None if the request should wait, because another request is computing at least half of the
        rest."""
        state, size = scheduling_of(request), self._pages.page_size
        if not state.looks_up:
            return 0
        most = (request.known - 1) // size
        extend_hashes(state.hashes, request, most, size)
        found = end = self._pages.match(state.hashes[:most])
        while end < most and state.hashes[end] in self._claims:
            end += 1
        shared, left = (end - found) * size, request.known - found * size
        return None if shared and 2 * shared >= left else found

    def enter(self, request: Request, found: int) -> None:
        """Record that the request begins to run with `found` cached pages."""
        state, prompt = scheduling_of(request), len(request.prompt)
        request.computed = found * self._pages.page_size
        if not request.preemptions:  # what it finds later is its own
            request.cached = min(request.computed, prompt)
        if state.looks_up:
            for digest in state.hashes[found:]:
                self._claims.setdefault(digest, request)
            if not request.preemptions:
                self.query_tokens += prompt
                self.hit_tokens += request.cached

    def leave(self, request: Request) -> None:
        """Register the pages of a request that is about to lose them, so that they can be found."""
        if scheduling_of(request).looks_up:
            self._register(request, min(request.known, request.computed) // self._pages.page_size)
            self._drop(request, scheduling_of(request).hashes)

    def register_full_pages(self) -> None:
        """Register the full pages of dispatched steps whose tokens are all known."""
        if not self.enabled:
            return
        running, registered = self._running, self._pages.registered
        slots = running.slots
        full = np.minimum(running.known[slots], running.computed[slots]) // self._pages.page_size
        behind = full - registered[slots]
        rows = behind.nonzero()[0]
        if len(rows) > _MOST_REGISTERED:
            rows = rows[np.argsort(-behind[rows], kind="stable")[:_MOST_REGISTERED]]
        digests, next_ones = [], []
        for slot, pages, missing in zip(slots[rows].tolist(), full[rows].tolist(), behind[rows].tolist(), strict=True):
            request = running.by_slot[slot]
            assert request is not None
            if not scheduling_of(request).looks_up:
                registered[slot] = pages
            elif missing > 1:
                self._register(request, pages)
            else:
                next_ones.append(slot)
                hashes = scheduling_of(request).hashes
                extend_hashes(hashes, request, pages, self._pages.page_size)
                digests.append(hashes[pages - 1])
                self._drop(request, digests[-1:])
        if digests:
            self._pages.register_next(np.array(next_ones, np.int32), digests)

    def _register(self, request: Request, full: int) -> None:
        hashes, before = scheduling_of(request).hashes, int(self._pages.registered[request.slot])
        extend_hashes(hashes, request, full, self._pages.page_size)
        self._pages.register(request.slot, hashes, full)
        self._drop(request, hashes[before:full])

    def _drop(self, request: Request, hashes: Iterable[bytes]) -> None:
        if self._claims:
            for digest in hashes:
                if self._claims.get(digest) is request:
                    del self._claims[digest]

    def hashes(self, request: Request, pages: int) -> Sequence[bytes]:
        """Return the hashes of the request's first `pages` pages, which `find` looked up."""
        return scheduling_of(request).hashes[:pages]
