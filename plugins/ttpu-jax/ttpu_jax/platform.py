"""What this machine has. It prepares the environment before JAX is imported: on a machine with libtpu but without a
TPU, JAX runs on the CPU without a warning."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

QUIET_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


CPU_INFO = Path("/proc/cpuinfo")
AMX = "amx_bf16"
BFLOAT16 = frozenset({"avx512_bf16", AMX})
"""The instructions of x86 processors that multiply bfloat16, as Linux names them."""


@cache
def processor_features() -> frozenset[str]:
    """The instruction sets of this machine's processor, as Linux names them; none where that cannot be read."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def multiplies_bfloat16() -> bool:
    """Whether this machine's processor has instructions that multiply bfloat16."""
    return not BFLOAT16.isdisjoint(processor_features())


def multiplies_bfloat16_tiles() -> bool:
    """Whether this machine's processor multiplies tiles of bfloat16 (AMX), many times as fast as float32."""
    return AMX in processor_features()


def has_tpu() -> bool:
    """Whether this machine exposes TPU chips (PCI accelerators, or VFIO devices on newer generations)."""
    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def prepare() -> None:
    """Choose the CPU on a machine without accelerators; the user's own JAX_PLATFORMS takes precedence."""
    if has_tpu():
        return
    for name, value in QUIET_LIBTPU.items():
        os.environ.setdefault(name, value)
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if not has_gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
