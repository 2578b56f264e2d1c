"""Threads whose work comes from many clients, who take turns."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ttpu_serve.api.client_pace import ProcessorPace


class FairExecutor:
    """Runs calls in one thread. Each client has a queue of its own, and the thread takes one call from each queue in
    turn, so that a client with many calls delays the others by one call at most. Of a client's calls the smallest comes
    first. With a pace, the calls of a client who took more than its share of the processors wait."""

    def __init__(self, name: str, pace: ProcessorPace | None = None) -> None:
        """
        Args:
            name: of the thread, which starts with the first call.
            pace: of clients that have a name, which other executors may share; None lets nobody wait.
        """
        self._name, self._pace = name, pace
        self._queues: OrderedDict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._numbers = itertools.count()  # of calls, in their order
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, client: str, work: Callable[[], Any], size: int = 0) -> Future[Any]:
        """Queue a call; cancelling its future takes it out unless it runs.

        Args:
            client: whose call it is.
            work: the call.
            size: how long it may take, in any unit. Calls of one size come in their order.

        Raises:
            RuntimeError: the executor is closed.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the executor {self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            heapq.heappush(self._queues.setdefault(client, []), (size, next(self._numbers), future, work))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel what waits, and end the thread after the call that runs."""
        with self._changed:
            self._closed = True
            for queued in self._queues.values():
                for _, _, future, _ in queued:
                    future.cancel()
            self._queues.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            client, future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            began = time.monotonic()
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            if self._pace is not None:
                self._pace.worked(client, time.monotonic() - began)
            del taken, future, work  # a thread that waits holds no prompt

    def _next(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._closed:
                client, seconds = self._whose_turn()
                if client is None or seconds > 0:
                    self._changed.wait(seconds or None)
                    continue
                queued = self._queues.pop(client)
                _, _, future, work = heapq.heappop(queued)
                if queued:
                    self._queues[client] = queued  # behind the others
                return client, future, work
            return None

    def _whose_turn(self) -> tuple[str | None, float]:
        """Return the client who may go on first, and the seconds after which it may."""
        found, least = None, 0.0
        for client in self._queues:
            seconds = self._pace.wait(client) if self._pace is not None and client else 0.0
            if seconds == 0:
                return client, 0.0
            if found is None or seconds < least:
                found, least = client, seconds
        return found, least
