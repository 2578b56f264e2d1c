"""Who is served first. In: requests with priorities and arrival times; out: one order that never changes while they
live, so that nobody is overtaken for ever and preemption cannot go round in circles."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from ttpu_serve.scheduling.request import Key, Request, SchedulingState


def scheduling_of(request: Request) -> SchedulingState:
    """The scheduler's notes on a request that was added."""
    assert request.scheduling is not None
    return request.scheduling


def place(request: Request, sequence: int, aging_seconds: float) -> Key:
    """The request's key; less is sooner.

    A request that came t seconds ago counts as priority - t / aging_seconds. Now is the same for all, so the order of
    two requests is that of priority + arrival / aging_seconds at all times. Ties go to the one added first."""
    aged = 0.0 if math.isinf(aging_seconds) else request.arrival / aging_seconds
    return (request.priority + aged, sequence)


def key_of(request: Request) -> Key:
    """The place of a request that was added."""
    return scheduling_of(request).key


class WaitingQueue:
    """Requests in the order of their keys."""

    def __init__(self) -> None:
        self._keys: list[Key] = []  # negated, so that the first request leaves from the end of the lists
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        """Puts it in its place."""
        index = self._index(request)
        self._keys.insert(index, _negated(request))
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Takes it out; it must be there."""
        index = self._index(request)
        assert self._requests[index] is request
        del self._keys[index], self._requests[index]

    def _index(self, request: Request) -> int:
        return bisect.bisect_left(self._keys, _negated(request))


def _negated(request: Request) -> Key:
    priority, sequence = key_of(request)
    return (-priority, -sequence)
