"""Room for the sequences of requests, some of which have many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Room:
    """Room for `size` sequences; requests come in in order. One of more sequences than that has the room for itself."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room for some sequences, and hold it."""
        needed = min(max(sequences, 1), self._size)
        if self._free >= needed and not self._waiting:
            self._free -= needed
        else:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((waiter, needed))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._free += needed
                with suppress(ValueError):
                    self._waiting.remove((waiter, needed))
                self._let_in()
                raise
        try:
            yield
        finally:
            self._free += needed
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._free >= self._waiting[0][1]:
            waiter, needed = self._waiting.popleft()
            if not waiter.done():
                self._free -= needed
                waiter.set_result(None)
