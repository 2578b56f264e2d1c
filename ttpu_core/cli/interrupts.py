"""Ctrl-C that is not lost. Python drops an exception that a callback of the garbage collector raises, and the handler
of a signal often runs in JAX's, above all while modules are imported."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

AGAIN_AFTER = 0.01  # seconds, in which the callback ends


def repeat_lost_interrupts() -> None:
    """Send SIGINT again to the main thread when its KeyboardInterrupt was dropped."""
    usual = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            usual(dropped)
            return
        again = threading.Timer(AGAIN_AFTER, _interrupt_main_thread)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook


def _interrupt_main_thread() -> None:
    main = threading.main_thread()
    if main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, signal.SIGINT)  # not raise_signal: a call of the system that waits ends, too
