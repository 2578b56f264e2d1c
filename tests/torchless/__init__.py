"""The environment of a process that a test starts and that runs models on JAX alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def torchless(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a process finds no torch: importing it and torch_xla takes eight seconds."""
    folders = (str(Path(__file__).parent), environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
