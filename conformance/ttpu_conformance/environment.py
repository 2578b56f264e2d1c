"""Prepares a process before JAX starts in it: eight virtual CPU devices for the sharded checks, and a platform."""

from __future__ import annotations

import os
from typing import Literal

Device = Literal["cpu", "tpu"]
VIRTUAL_DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"


def prepare(device: Device = "cpu") -> None:
    """Set what JAX reads when it starts; what the user has set already stays. Too late once JAX has looked for devices.

    Torch takes one thread: the models are so small that more of them only wait for each other.
    """
    from ttpu_jax.platform import prepare as prepare_platform

    if _FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={VIRTUAL_DEVICES}".strip()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of each resharding that tiny shapes force on it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_platform()


def missing_device(device: Device) -> str | None:
    """Why checks cannot run on a device here; None if they can."""
    import jax

    if device == "cpu":
        return None
    found = jax.devices()[0]
    if found.platform == "tpu":
        # float32 is compared with float32: a TPU multiplies in bfloat16 unless it is told not to.
        jax.config.update("jax_default_matmul_precision", "highest")
        return None
    return f"there is no TPU here: JAX found {found.device_kind!r} ({found.platform})"


def missing_virtual_devices() -> str | None:
    """Why sharded checks cannot run in this process; None if they can."""
    import jax

    if jax.device_count() >= VIRTUAL_DEVICES:
        return None
    return (
        f"JAX started with {jax.device_count()} devices here, and sharded checks need {VIRTUAL_DEVICES}: set "
        f"XLA_FLAGS={_FLAG}={VIRTUAL_DEVICES} before JAX is imported"
    )
