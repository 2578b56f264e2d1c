"""Runs what the tests ask of eight simulated devices, in one process: starting one costs as much as several cases.
Run as a script, it prints one JSON object, of which the tests of attention, generation, sharding and training read
parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from once import once

if TYPE_CHECKING:
    import pytest

DEVICES = 8


def said(factory: pytest.TempPathFactory) -> Any:
    """What the script prints, which runs once for all workers."""
    return once(factory, "xla_spmd", _run)


def _run() -> Any:
    simulated = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "JAX_PLATFORMS": "cpu"}
    environment = os.environ | simulated | {"PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=1800, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.rpartition("\n")[2])


def main() -> None:
    """Every case of the modules."""
    import xla_attention_cases
    import xla_spmd_cases
    import xla_spmd_generate
    import xla_training_cases

    from ttpu_torch_xla.runtime import current

    runtime = current()
    runtime.use_spmd()
    assert runtime.num_devices() == DEVICES  # torch counts them at the first backward pass of a process
    parts: dict[str, Any] = {
        "attention": xla_attention_cases,
        "cases": xla_spmd_cases,
        "generated": xla_spmd_generate,
        "training": xla_training_cases,
    }
    json.dump({name: part.cases() for name, part in parts.items()}, sys.stdout)


if __name__ == "__main__":
    main()
