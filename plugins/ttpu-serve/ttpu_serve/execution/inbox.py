"""Distributes the deltas of an engine's steps to the callers that wait for them, when several callers take turns
stepping one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ttpu_core.errors import RequestError
from ttpu_serve.api.outputs import OutputDelta

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore


MOST_FAILURES = 8


class Inbox:
    """The queue of deltas of some requests. `EngineCore.inbox` makes it; `close` ends it and aborts unfinished
    requests."""

    def __init__(self, engine: EngineCore, request_ids: Iterable[str]) -> None:
        self._engine, self.request_ids = engine, tuple(request_ids)
        self._deltas: deque[OutputDelta] = deque()
        for request_id in self.request_ids:
            engine.turns.inboxes[request_id] = self

    def put(self, delta: OutputDelta) -> None:
        """Queue a delta."""
        self._deltas.append(delta)

    def take(self) -> list[OutputDelta]:
        """Return the queued deltas; run a step of the engine if there are none, also after the step of another thread
        that this call waited for.

        Raises:
            RequestError: the engine sleeps or is closed, so that no delta can come.
            Exception: of a step that had only this caller's requests, or that fails again and again. Else the step is
                tried once more, and then its requests end with deltas that say why.
        """
        engine = self._engine
        with engine.turns.lock:
            if not self._deltas:
                if engine.asleep or engine.closed:
                    why = "is closed: open another one" if engine.closed else "is asleep: call wake_up() first"
                    raise RequestError(f"outputs were waited for, but the engine {why}.")
                self._step()
            taken = list(self._deltas)
            self._deltas.clear()
        return taken

    def _step(self) -> None:
        engine = self._engine
        try:
            for delta in engine.step():
                engine.hold(delta)  # of callers without an inbox
        except Exception as error:
            engine.failures += 1
            alone = all(inbox is self for inbox in engine.turns.inboxes.values())
            if alone or engine.failures > MOST_FAILURES:
                engine.failures = 0
                raise
            if engine.failures > 1:  # not by chance: the step's requests end, and each caller is told of its own
                engine.end_failed(error)
        else:
            engine.failures = 0

    def close(self) -> None:
        """Close the queue and abort unfinished requests."""
        self._engine.turns.drop(self)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
