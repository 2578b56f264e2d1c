"""Ends a run in order when its process is told to end: by Ctrl-C, or by SIGTERM, as clouds announce a preemption."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While it is entered, the first signal sets `signal_name`, and a second one ends the process as usual. Only a
    process's main thread can be told."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._told) for one in HANDLED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def pass_on(self) -> None:
        """Give the signal that came, if one did, to what handled it before. An exception of a handler is lost where JAX
        runs with the collector of garbage, as it often does while texts become tokens; here it is not."""
        name, self.signal_name = self.signal_name, None
        if name is not None:
            signal.raise_signal(signal.Signals[name])

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._before = {}
