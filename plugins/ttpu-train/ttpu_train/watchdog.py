"""Reports updates that hang, from a thread of its own, because the main one waits for the devices; and names the
slowest of several processes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

logger = logging.getLogger(__name__)

KNOWN = 5
"""Updates whose times must be known before others are compared with their median."""
REMEMBERED = 101
"""The newest times that the median is of."""
LEAST_SECONDS = 5.0
"""An update that takes less is not called hung by comparison: tiny models' updates take milliseconds."""


@runtime_checkable
class Gathers(Protocol):
    """A runner of several processes that exchanges numbers between them."""

    def gathered(self, value: float) -> tuple[float, ...]:
        """The value of each process, in their order; each must call it at the same place."""
        ...


class Watchdog:
    """Times updates, and reports one that takes too long while it still runs.

    Args:
        factor: an update that takes more than this times the median is reported; 0 compares none.
        seconds: an update that takes longer is reported, the first, which compiles, too; None for no such limit.
        process: the number of this process, for the report.
        processes: of the run.
    """

    def __init__(self, factor: float, seconds: float | None, process: int = 0, processes: int = 1) -> None:
        self._factor, self._seconds = factor, seconds
        self._who = f" on process {process} of {processes}" if processes > 1 else ""
        self._times: dict[bool, deque[float]] = {kind: deque(maxlen=REMEMBERED) for kind in (False, True)}
        self._samples = False
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reported: int | None = None
        self._step, self._waits_for = 0, ""
        self._host_seconds, self._updates, self._host_since = 0.0, 0, time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ttpu-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._factor or self._seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, step: int, waits_for: str, *, samples: bool = False) -> None:
        """From now on an update's time counts, or goes on to count, and this is what the run waits for. Times in which
        completions are sampled are compared with each other alone: they are much longer."""
        now = time.perf_counter()
        with self._lock:
            if self._since is None:
                self._since, self._reported = now, None
            self._step = step
            self._samples |= samples
            if self._waits_for != "devices" and waits_for == "devices":
                self._host_seconds += now - self._host_since
            self._waits_for = waits_for

    def done(self, step: int) -> None:
        """An update's figures are there; the next one's time counts from now."""
        now = time.perf_counter()
        with self._lock:
            if self._since is not None:
                taken = now - self._since
                if self._reported is not None:
                    logger.warning("update %d went on%s after %.1f s", self._reported, self._who, taken)
                self._times[self._samples].append(taken)
            self._since, self._reported, self._samples = now, None, False
            self._step, self._waits_for, self._host_since = step + 1, "the host", now
            self._updates += 1

    def pause(self) -> None:
        """Until the next `begin` no update is waited for: it is evaluated, saved or logged."""
        with self._lock:
            self._since, self._host_since, self._waits_for = None, time.perf_counter(), ""
            self._samples = False

    def figures(self, runner: Any) -> dict[str, Any]:
        """Of the updates since the last call: host_seconds, the time of an update in which a process reads data and
        runs callbacks and the devices may wait for it, of the slowest process, and slowest_process, its number. Nothing
        with one process."""
        with self._lock:
            own = self._host_seconds / max(1, self._updates)
            self._host_seconds, self._updates = 0.0, 0
        if runner.layout.process_count == 1 or not isinstance(runner, Gathers):
            return {}
        every = runner.gathered(own)
        slowest = max(range(len(every)), key=lambda process: every[process])
        return {"host_seconds": every[slowest], "slowest_process": slowest}

    def limit(self) -> float | None:
        """The seconds after which an update is reported; None as long as nothing is known."""
        limits = [] if self._seconds is None else [self._seconds]
        times = self._times[self._samples]
        if self._factor and len(times) >= KNOWN:
            limits.append(max(LEAST_SECONDS, self._factor * median(times)))
        return min(limits) if limits else None

    def look(self) -> None:
        """Report the update that takes too long, once."""
        with self._lock:
            limit = self.limit()
            taken = 0.0 if self._since is None else time.perf_counter() - self._since
            if limit is None or taken <= limit or self._reported is not None:
                return
            self._reported = self._step
            times = self._times[self._samples]
            usual = f"the median is {median(times):.2f} s" if times else "none has ended before"
            logger.warning(
                "update %d has taken %.1f s so far%s, %s; it waits for %s", self._step, taken, self._who, usual,
                self._waits_for,
            )  # fmt: skip

    def _watch(self) -> None:
        while not self._ended.wait(1.0 if self._seconds is None else min(1.0, self._seconds / 4)):
            self.look()
