"""The devices that checks run on, and the environment that a process needs before torch starts in it."""

from __future__ import annotations

import os
from typing import Literal

Device = Literal["cpu", "tpu"]
VIRTUAL_DEVICES = 8


def prepare() -> None:
    """Set the environment variables that the libraries of the reference models read when they start. Variables that the
    user has set stay.

    Torch takes one thread: the models are so small that more of them only wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
