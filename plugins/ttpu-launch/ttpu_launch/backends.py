"""What processes of a backend need beside their place among the others. In: a backend, where it is launched and how
many processes that makes; out: variables for them, or one sentence about what the backend cannot do."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.errors import LaunchError
from ttpu_launch.options import WORKER

JAX, TORCH_XLA = "jax", "torch_xla"
DEVICE, CPU_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
"""The variables by which torch_xla is told its platform, and how many CPU devices to simulate."""


def check_backend(backend: str) -> None:
    """Refuse a name that the launcher does not know.

    Raises:
        LaunchError: it is neither.
    """
    if backend not in (JAX, TORCH_XLA):
        raise LaunchError(
            f"--backend {backend!r} was given, but processes are launched for {JAX} or {TORCH_XLA}: pass one of them, "
            "or leave it out for a backend that needs no variables of its own."
        )


def check_processes(backend: str, per_host: int) -> None:
    """Refuse more processes on a host than the backend has there.

    Raises:
        LaunchError: torch_xla was to have more than one.
    """
    if backend == TORCH_XLA and per_host > 1:
        raise LaunchError(
            f"--backend {TORCH_XLA} was given with {per_host} processes on a host, but torch_xla drives all devices of "
            "a host from one process: start one on each (without --nproc-per-node; in SLURM with --ntasks-per-node=1), "
            "and say with --devices-per-process how many devices a CPU simulates."
        )


def variables_for(
    backend: str, place: str, processes: int, local_devices: int | None, given: Mapping[str, str]
) -> dict[str, str]:
    """The variables of each process.

    Args:
        place: one of `ttpu_launch.options.PLACES`: where processes are started now, or what a script says.
        processes: how many there are in all, where the launcher knows.
        local_devices: CPU devices that each simulates; None for the accelerators that are there.
        given: the variables that they have anyhow, which stay as they are.

    Raises:
        LaunchError: torch_xla was to run in several processes on CPUs, whose collectives abort.
    """
    if backend != TORCH_XLA:
        return {}
    device = given.get(DEVICE, "") or ("TPU" if place == WORKER else "CPU" if local_devices else "")
    if place != WORKER and processes > 1 and device != "TPU":
        raise LaunchError(
            f"--backend {TORCH_XLA} was given for {processes} processes, but torch_xla joins processes on TPUs only: "
            f"pass --env {DEVICE}=TPU if these hosts have TPUs, or simulate several CPU devices in one process with "
            "--devices-per-process."
        )
    if local_devices and device != "CPU":
        raise LaunchError(
            f"--devices-per-process {local_devices} was given, but {DEVICE} is {device!r}, whose devices are not "
            "simulated: leave one of them out."
        )
    found = {DEVICE: device} if device else {}
    return found | ({CPU_DEVICES: str(local_devices)} if local_devices else {})
