"""Joins a torch_xla process to a distributed job that `ttpu launch` started. It sets the runtime's environment
variables before the runtime starts, and afterwards the process index where the core reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, NUM_PROCESSES, PROCESS_ID, contract_of
from ttpu_torch_xla.launching import CPU_DEVICES, DEVICE


def before_start(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables for simulated CPU devices, where the contract has any; variables that are set
    already stay.

    Raises:
        LaunchError: the contract contradicts itself, or this is one of several processes on a CPU.
    """
    contract = contract_of(environment)
    if contract is None:
        return
    if contract.local_devices is not None:
        environment.setdefault(DEVICE, "CPU")
        environment.setdefault(CPU_DEVICES, str(contract.local_devices))
    if (contract.num_processes or 1) > 1 and environment.get(DEVICE) == "CPU":
        raise LaunchError(
            f"this is process {contract.process_id} of {contract.num_processes} on a CPU, but torch_xla joins "
            "processes on TPUs only: run `ttpu launch --backend torch_xla --devices-per-process N` with one process, "
            "which simulates N devices."
        )


def after_start(process: Callable[[], tuple[int, int]], environment: MutableMapping[str, str] = os.environ) -> None:
    """On a TPU slice the runtime alone knows the number: `process` asks it for this process's, and for how many there
    are."""
    contract = contract_of(environment)
    if contract is not None and contract.coordinator == AUTO and contract.process_id is None:
        number, count = process()
        environment[PROCESS_ID], environment[NUM_PROCESSES] = str(number), str(count)
