"""A number of slots for which owners take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class FairSlots:
    """At most `count` slots are taken. A free one goes to the owner who has waited longest since its last one, so that
    an owner of much work delays the others by one piece of it."""

    def __init__(self, count: int) -> None:
        self.count = self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def taken(self) -> int:
        """Slots that are taken."""
        return self.count - self._free

    async def take(self, owner: str) -> None:
        """Wait for a slot."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back()  # it was given in the same moment
            else:
                self._forget(owner, waiter)
            raise

    def give_back(self) -> None:
        """Give a slot to who waits for one."""
        self._free += 1
        while self._free and self._waiting:
            owner, waiters = self._waiting.popitem(last=False)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[owner] = waiters  # behind the others
            if not waiter.done():
                self._free -= 1
                waiter.set_result(None)

    def _forget(self, owner: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(owner)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[owner]
