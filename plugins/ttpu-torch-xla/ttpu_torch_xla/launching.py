"""Implements `ttpu_core.backend.Launches` for torch_xla: the environment variables of its processes, and how many
processes a host may have. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.errors import LaunchError

NAME = "torch_xla"
DEVICE, CPU_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
"""The variables by which torch_xla is told its platform, and how many CPU devices to simulate."""


class TorchXlaLaunches:
    """One process drives all devices of a host; several processes are joined on TPUs only."""

    variables = (DEVICE, CPU_DEVICES)

    def check_processes(self, per_host: int) -> None:
        """Refuse more than one process on a host.

        Raises:
            LaunchError: there are more.
        """
        if per_host > 1:
            raise LaunchError(
                f"--backend {NAME} was given with {per_host} processes on a host, but torch_xla drives all devices of "
                "a host from one process: start one on each (without --nproc-per-node; in SLURM with "
                "--ntasks-per-node=1), and say with --devices-per-process how many devices a CPU simulates."
            )

    def variables_for(
        self, processes: int, local_devices: int | None, given: Mapping[str, str], *, on_tpu_worker: bool
    ) -> dict[str, str]:
        """The platform and the number of simulated devices; see `ttpu_core.backend.Launches`.

        Raises:
            LaunchError: several processes on CPUs, whose collectives abort, or simulated devices on another platform.
        """
        device = given.get(DEVICE, "") or ("TPU" if on_tpu_worker else "CPU" if local_devices else "")
        if not on_tpu_worker and processes > 1 and device != "TPU":
            raise LaunchError(
                f"--backend {NAME} was given for {processes} processes, but torch_xla joins processes on TPUs only: "
                f"pass --env {DEVICE}=TPU if these hosts have TPUs, or simulate several CPU devices in one process "
                "with --devices-per-process."
            )
        if local_devices and device != "CPU":
            raise LaunchError(
                f"--devices-per-process {local_devices} was given, but {DEVICE} is {device!r}, whose devices are not "
                "simulated: leave one of them out."
            )
        found = {DEVICE: device} if device else {}
        return found | ({CPU_DEVICES: str(local_devices)} if local_devices else {})


LAUNCHES = TorchXlaLaunches()
