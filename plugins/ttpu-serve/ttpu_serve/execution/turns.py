"""Threads call an engine in turn, and leave it with the requests of callers that went away aborted."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakMethod

from ttpu_serve.execution.inbox import Inbox

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Whose turn it is.

    Args:
        abort: a method of the engine, which drops a request by its id. It is held weakly: an engine that nobody holds
            gives its memory back at once, and not when cycles are collected.

    Attributes:
        lock: the thread that holds it calls the engine; it may be taken again by that thread.
        inboxes: request id → the inbox that its deltas go to.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self.inboxes: dict[str, Inbox] = {}
        self._abort = WeakMethod(abort)
        self._is_taken = False
        self._dropped: deque[Inbox] = deque()

    @property
    def has_dropped(self) -> bool:
        """Whether an inbox was closed whose requests are not aborted yet."""
        return bool(self._dropped)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait until no other thread is within this. When it is entered, and when it is left without an error, requests
        of inboxes that were closed meanwhile are aborted."""
        with self.lock:
            if self._is_taken:
                yield
                return
            self._is_taken = True
            try:
                self._abort_dropped()
                yield
                self._abort_dropped()
            finally:
                self._is_taken = False

    def drop(self, inbox: Inbox) -> None:
        """Abort the requests of an inbox: at once, or, during a call of the engine, at its end. It waits for nobody,
        as a garbage collector may call it in any thread and between any two lines of a step."""
        self._dropped.append(inbox)
        if self.lock.acquire(blocking=False):
            try:
                if not self._is_taken:
                    with self.taken():
                        pass
            finally:
                self.lock.release()

    def _abort_dropped(self) -> None:
        while self._dropped:
            inbox = self._dropped.popleft()
            for request_id in inbox.request_ids:
                if self.inboxes.get(request_id) is inbox:
                    del self.inboxes[request_id]
                    if (abort := self._abort()) is not None:
                        abort(request_id)


class HasTurns(Protocol):
    """What threads call in turn."""

    turns: Turns


E = TypeVar("E", bound=HasTurns)


def in_turn(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """A method that waits until no other thread is within one of these."""

    @functools.wraps(method)
    def called(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.turns.taken():
            return method(self, *args, **kwargs)

    return called
