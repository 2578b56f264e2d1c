"""How fast a run is: tokens per second and device, and the share of the devices' peak FLOPs (MFU)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """Counts tokens between two lines of the log.

    Attributes:
        flops_per_token: of an update; 0 where unknown.
        devices: of all processes.
        peak_flops: of one device, per second; None where unknown.
    """

    flops_per_token: float
    devices: int
    peak_flops: float | None
    tokens: float = 0.0
    updates: int = 0
    began: float = 0.0

    def start(self) -> None:
        """Begin to count."""
        self.tokens, self.updates, self.began = 0.0, 0, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that is spent within."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.began += time.perf_counter() - began

    def add(self, tokens: float) -> None:
        """Count an update on this many tokens."""
        self.tokens += tokens
        self.updates += 1

    def figures(self) -> dict[str, float]:
        """Seconds an update, tokens per second and device, and MFU where the peak is known; counting begins anew."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        rate = self.tokens / seconds / self.devices
        figures = {
            "step_seconds": seconds / max(1, self.updates),
            "tokens_per_second_per_device": rate,
        }
        if self.peak_flops and self.flops_per_token:
            figures["mfu"] = rate * self.flops_per_token / self.peak_flops
        self.start()
        return figures
