"""Joins this process to a distributed JAX job, as the environment describes it (`ttpu_core.processes`). Afterwards
`jax.devices()` are the devices of all processes. It runs before any device is used, and does nothing for a single
process."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import jax
import numpy as np
from jax.sharding import Mesh

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, NUM_PROCESSES, PROCESS_ID, Contract, contract_of, leave_at_once
from ttpu_core.registry import default_registry

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_initialized = False


def initialize() -> None:
    """Join the other processes of the job. Further calls do nothing.

    On a CPU the processes talk through gloo. From here on an exception that nobody catches ends this process at once:
    JAX would otherwise wait at exit for the others, which may be waiting for this one.

    Raises:
        LaunchError: the contract is half set or contradicts itself, the others cannot be met in time, JAX has devices
            already, or "auto" finds no TPU slice.
    """
    global _initialized
    if _initialized:
        return
    contract = contract_of(os.environ)
    if contract is None:
        return
    try:
        _configure(contract)
        if contract.coordinator == AUTO:
            _join_slice(contract)
        elif contract.num_processes != 1:
            default_registry().service("rendezvous").meet(contract)
            jax.distributed.initialize(
                contract.coordinator,
                contract.num_processes,
                contract.process_id,
                initialization_timeout=contract.timeout,
                cluster_detection_method="deactivate",
            )
    except RuntimeError as error:  # JAX's own words differ by release
        raise LaunchError(
            f"this process is to be one of several at {contract.coordinator}, but JAX refuses to join them "
            f"({_one_line(error)}): call ttpu_jax.distributed.initialize() before anything uses a device."
        ) from error
    _initialized = True
    if os.environ.get(NUM_PROCESSES) != "1":
        sys.excepthook = _end_at_once


def shared_seed(seed: int | None, mesh: Mesh | None) -> int | None:
    """Return `seed`, or where it is None and the mesh has devices of several processes, a random one that all of them
    share. With seeds of their own, processes would sample different tokens.

    All processes of such a mesh must come here. Without one each process runs by itself, and asks nobody.
    """
    if seed is not None or mesh is None or all(d.process_index == jax.process_index() for d in mesh.devices.flat):
        return seed
    from jax.experimental import multihost_utils

    drawn = np.frombuffer(os.urandom(4), np.uint32)
    return int(multihost_utils.broadcast_one_to_all(drawn)[0])


def _configure(contract: Contract) -> None:
    """What must be said before devices exist."""
    if contract.local_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", contract.local_devices)
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if contract.num_processes != 1:
            default_registry().service("rendezvous").keep_stdout()
    # JAX's preemption service would catch the SIGTERM by which a launcher ends a process, which then went on.
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def _join_slice(contract: Contract) -> None:
    """Let the TPU runtime say which process this is, and write it where the core looks."""
    try:
        jax.distributed.initialize(initialization_timeout=contract.timeout)
    except ValueError as error:
        raise LaunchError(
            f"this process is to be a worker of a TPU slice, but none can be found here ({_one_line(error)}): run "
            "`ttpu launch --tpu-pod` on the workers of a slice, or give it hosts (--hosts) elsewhere."
        ) from error
    os.environ[NUM_PROCESSES], os.environ[PROCESS_ID] = str(jax.process_count()), str(jax.process_index())


def _end_at_once(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    leave_at_once(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
