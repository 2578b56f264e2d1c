"""SLURM: the contract of an srun task from its environment, and batch scripts that run a command on several nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ttpu_core.errors import LaunchError
from ttpu_core.processes import DEFAULT_TIMEOUT, Contract
from ttpu_launch.options import DEFAULT_GRACE, own_options

FIRST_PORT, PORTS = 61440, 4096
"""The coordinator's port is derived from the job's number, so that two jobs on a node rarely share it. JAX uses the
same rule."""


TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Variables with the number of tasks per node. The step's variable comes before the job's, because a step may change
it."""


def slurm_contract(
    environment: Mapping[str, str], *, local_devices: int | None = None, timeout: int = DEFAULT_TIMEOUT
) -> Contract:
    """The contract of the srun task with this environment.

    Raises:
        LaunchError: this process is not a task of srun.
    """
    needed = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")
    missing = [name for name in needed if not environment.get(name, "").isdecimal()]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    if not nodes:
        missing.append("SLURM_STEP_NODELIST")
    if missing:
        where = "inside an allocation, but not by srun" if "SLURM_JOB_ID" in environment else "outside an allocation"
        raise LaunchError(
            f"--slurm was given {where} ({', '.join(missing)} not set): run `srun --kill-on-bad-exit=1 ttpu launch "
            "--slurm -- COMMAND` in an allocation, or write a batch script with --slurm-script FILE."
        )
    job, count, number = (int(environment[name]) for name in needed)
    port = FIRST_PORT + job % PORTS
    return Contract(f"{first_node(nodes)}:{port}", count, number, local_devices, timeout)


def tasks_per_node(environment: Mapping[str, str]) -> int:
    """The largest number of tasks of this step on a node, from a text such as `2(x3),1`; 1 if SLURM does not say."""
    said = next((environment[name] for name in TASKS_PER_NODE if environment.get(name)), "1")
    return max((int(part) for part in re.findall(r"(?:^|,)\s*(\d+)", said)), default=1)


def first_node(nodes: str) -> str:
    """The first host of a compressed list: `rack[1-2]tpu[003-010,012],gpu1` gives `rack1tpu003`.

    Raises:
        LaunchError: brackets are not closed, or do not begin with a number.
    """
    match = re.match(r"((?:[^,\[\]]|\[\d[^\[\]]*\])+)(?:,|$)", nodes)
    if match is None:
        raise LaunchError(
            f"SLURM's list of nodes is {nodes!r}, but a compressed list of hosts such as 'tpu[001-004]' is needed: see "
            "`squeue`."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


@dataclass(frozen=True)
class BatchScript:
    """A batch script for SLURM. `options` are further options of sbatch, such as "--account=lab". A variable whose
    value is None takes it from sbatch's own environment; the script does not contain the value."""

    command: tuple[str, ...]
    directory: str
    nodes: int
    processes_per_node: int = 1
    name: str = "ttpu"
    time: str | None = None
    partition: str | None = None
    local_devices: int | None = None
    timeout: int = DEFAULT_TIMEOUT
    grace: float = DEFAULT_GRACE
    backend: str | None = None
    environment: tuple[tuple[str, str | None], ...] = ()
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The script.

        Raises:
            LaunchError: an option has several lines or does not begin with "-".
        """
        asked = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.processes_per_node}",
            f"--chdir={self.directory}",
            *([f"--time={self.time}"] if self.time else []),
            *([f"--partition={self.partition}"] if self.partition else []),
            *self.options,
        ]
        bad = [option for option in asked if "\n" in option or not option.startswith("-")]
        if bad:
            raise LaunchError(
                f"{bad[0]!r} was to be an option of sbatch, but it does not begin with '-' or has several lines: "
                "write it as in --sbatch=--account=lab."
            )
        launch = ["ttpu", "launch", "--slurm"]
        launch += [] if self.local_devices is None else ["--devices-per-process", str(self.local_devices)]
        launch += own_options(self.timeout, self.grace, self.backend)
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(option)}" for option in asked),
            "",
            "set -euo pipefail",
            *(_exported(name, value) for name, value in self.environment),
            "# Every task of srun is one process; `ttpu launch --slurm` reads its number from SLURM's variables.",
            f"srun --kill-on-bad-exit=1 {shlex.join(launch)} -- {shlex.join(self.command)}",
        ]
        return "\n".join(lines) + "\n"


def _exported(name: str, value: str | None) -> str:
    if value is not None:
        return f"export {name}={shlex.quote(value)}"
    return f': "${{{name}?is not set in the job: set it where sbatch is called, and do not limit --export}}"'


def _quoted(option: str) -> str:
    """The option quoted for sbatch, which splits its comments as a shell does."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else option
