"""Threads whose work comes from many clients, who take turns."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class FairExecutor:
    """Runs calls in one thread. Each client has a queue of its own, and the thread takes one call from each queue in
    turn, so that a client with many calls delays the others by one call at most. Of a client's calls the smallest comes
    first."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: of the thread, which starts with the first call.
        """
        self._name = name
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
            future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del taken, future, work  # a thread that waits holds no prompt

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._queues:
                if self._closed:
                    return None
                self._changed.wait()
            client, queued = self._queues.popitem(last=False)
            _, _, future, work = heapq.heappop(queued)
            if queued:
                self._queues[client] = queued  # behind the others
            return future, work
