"""How many devices XLA simulates in a process that a test starts. Whatever else its flags say stays, such as how little
the compiler optimises under `make test`."""

from __future__ import annotations

import os

DEVICE_COUNT = "--xla_force_host_platform_device_count"


def xla_flags(devices: int | None = None) -> str:
    """XLA_FLAGS of this process, with so many simulated CPU devices, or without a number of them."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_COUNT)]
    return " ".join(kept if devices is None else [*kept, f"{DEVICE_COUNT}={devices}"])
