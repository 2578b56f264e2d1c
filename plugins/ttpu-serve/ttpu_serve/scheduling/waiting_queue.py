"""The waiting queue, ordered by priority and arrival. The order of two requests never changes, so that no request
starves and preemption cannot cycle."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from ttpu_serve.scheduling.request import Key, Request, SchedulingState


def scheduling_of(request: Request) -> SchedulingState:
    """Return the scheduler's state of a request that was added."""
    assert request.scheduling is not None
    return request.scheduling


def place(request: Request, sequence: int, aging_seconds: float) -> Key:
    """Return the request's sort key; lower is sooner.

    A request that arrived t seconds ago counts as priority - t / aging_seconds. The current time is common to all
    requests, so they are ordered by priority + arrival / aging_seconds. Ties go to the request added first.
    """
    aged = 0.0 if math.isinf(aging_seconds) else request.arrival / aging_seconds
    return (request.priority + aged, sequence)


def key_of(request: Request) -> Key:
    """Return the sort key of a request that was added."""
    return scheduling_of(request).key


class WaitingQueue:
    """Waiting requests, sorted by key."""

    def __init__(self) -> None:
        self._keys: list[Key] = []  # negated, so that the first request leaves from the end of the lists
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request at its position."""
        index = self._index(request)
        self._keys.insert(index, _negated(request))
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        index = self._index(request)
        assert self._requests[index] is request
        del self._keys[index], self._requests[index]

    def _index(self, request: Request) -> int:
        return bisect.bisect_left(self._keys, _negated(request))


def _negated(request: Request) -> Key:
    priority, sequence = key_of(request)
    return (-priority, -sequence)
