"""The environment contract of one process among several: the address of process 0, the number of processes, and this
process's number. `contract_of` reads and checks the variables; a process that runs alone has none. Backends act
on the contract."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ttpu_core.errors import LaunchError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "TTPU_COORDINATOR", "TTPU_NUM_PROCESSES", "TTPU_PROCESS_ID"
LOCAL_DEVICES, TIMEOUT = "TTPU_LOCAL_DEVICES", "TTPU_TIMEOUT"
RESTART = "TTPU_RESTART"
"""How often `ttpu launch --restarts` has started this process again; not set the first time."""
AUTO = "auto"
"""A coordinator of "auto": the TPU runtime knows its slice and finds address, count and number by itself."""

DEFAULT_TIMEOUT = 300
"""Seconds that a process waits for the others; the default of jax.distributed."""

LINGER_SECONDS = 0.5


@dataclass(frozen=True)
class Contract:
    """A process's place among the others.

    Args:
        coordinator: "host:port" of process 0, or "auto".
        num_processes: number of processes; None if the coordinator is "auto" and the runtime has not been asked yet.
        process_id: this process's number; None in the same case.
        local_devices: number of CPU devices that this process simulates; None for real accelerators.
        timeout: seconds to wait for the others.
    """

    coordinator: str
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: int | None = None
    timeout: int = DEFAULT_TIMEOUT

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator, which must not be "auto"."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def environment(self) -> dict[str, str]:
        """All variables of the contract. A variable without a value is empty, so that it overrides a value in the
        caller's environment."""
        values = {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: self.num_processes,
            PROCESS_ID: self.process_id,
            LOCAL_DEVICES: self.local_devices,
            TIMEOUT: self.timeout,
        }
        return {name: "" if value is None else str(value) for name, value in values.items()}


def contract_of(environment: Mapping[str, str]) -> Contract | None:
    """The contract in these variables, or None if there is none.

    Raises:
        LaunchError: some variables are set and others missing, or a value is malformed or out of range.
    """
    given = {name: environment.get(name, "").strip() for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)}
    present = [name for name, value in given.items() if value]
    if not present:
        return None
    coordinator = given[COORDINATOR]
    needed = [COORDINATOR] if coordinator == AUTO else list(given)
    missing = [name for name in needed if not given[name]]
    if missing:
        raise LaunchError(
            f"{' and '.join(present)} {'is' if len(present) == 1 else 'are'} set in the environment, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: set {', '.join(given)} together, as "
            "`ttpu launch` does, or none of them."
        )
    if coordinator != AUTO:
        _check_address(coordinator)
    count, number = (_whole(environment, name, low) for name, low in ((NUM_PROCESSES, 1), (PROCESS_ID, 0)))
    if count is not None and number is not None and number >= count:
        raise LaunchError(
            f"{PROCESS_ID} is {number}, but {NUM_PROCESSES} is {count}, whose processes are numbered 0 to {count - 1}: "
            "correct one of them."
        )
    timeout = _whole(environment, TIMEOUT, 1)
    local = _whole(environment, LOCAL_DEVICES, 1)
    return Contract(coordinator, count, number, local, DEFAULT_TIMEOUT if timeout is None else timeout)


def is_first_process() -> bool:
    """Whether this process prints for all: it runs alone or is number 0. A backend that asks the runtime for the
    number writes it into the environment."""
    return os.environ.get(PROCESS_ID, "0").strip() in ("", "0")


def is_one_of_several() -> bool:
    """Whether this process was started as one of several."""
    return os.environ.get(NUM_PROCESSES, "1").strip() not in ("", "1") or os.environ.get(COORDINATOR) == AUTO


def is_restarted() -> bool:
    """Whether this process was started again because one of the processes had failed."""
    return os.environ.get(RESTART, "0").strip() not in ("", "0")


def leave_at_once(status: int) -> NoReturn:
    """End this failed process without the interpreter's exit handlers. A framework's handlers wait for the other
    processes, which may be waiting for this one.

    The process waits a moment first, so that other processes that fail for the same reason report it, and not that
    this one is gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe: nobody reads the message
            continue
    time.sleep(LINGER_SECONDS)
    os._exit(status)


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))  # an IPv6 address without brackets
    if not host or bare or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise LaunchError(
            f"{COORDINATOR} is {coordinator!r}, but a host and a port are needed, such as 10.0.0.2:8476 or "
            f"[fd00::1]:8476, or {AUTO!r} on a TPU slice: correct it."
        )


def _whole(environment: Mapping[str, str], name: str, low: int) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < low:
        raise LaunchError(f"{name} is {text!r}, but a whole number of {low} or more is needed: correct it.")
    return int(text)
