"""Creates a task with its contract for each process, on this machine or on hosts reached by ssh."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ttpu_core.errors import LaunchError
from ttpu_core.processes import Contract
from ttpu_launch.options import DEFAULT_SSH
from ttpu_launch.supervisor import Task

DEFAULT_PORT = 8476
"""Port of process 0 on another machine, whose free ports are unknown here."""

PASSED_ON = ("JAX_", "XLA_", "LIBTPU_", "TTPU_", "HF_", "OMP_", "PYTHON")
"""Prefixes of variables that are passed to other machines, besides those requested with --env. Variables of the TPU
runtime (TPU_*) are not passed on: they describe this machine."""

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine and its number of processes."""

    name: str
    processes: int

    @property
    def address(self) -> str:
        """The host's name for other machines: the name without ssh's user."""
        return self.name.rpartition("@")[2]


def local_tasks(
    command: Sequence[str], processes: int, contract: Contract, environment: Mapping[str, str]
) -> list[Task]:
    """`processes` tasks in this directory. `contract` holds their common values."""
    return [
        own_task(str(number), command, replace(contract, num_processes=processes, process_id=number), environment)
        for number in range(processes)
    ]


def own_task(label: str, command: Sequence[str], contract: Contract, environment: Mapping[str, str]) -> Task:
    """The only process of this machine, when another launcher starts this command on all machines."""
    return Task(
        label, tuple(command), {"PYTHONUNBUFFERED": "1", **environment, **contract.environment()}, directory()
    )


def ssh_tasks(
    command: Sequence[str],
    hosts: Sequence[Host],
    contract: Contract,
    environment: Mapping[str, str],
    *,
    python: str,
    ssh: str = DEFAULT_SSH,
) -> list[Task]:
    """Tasks on the hosts in their order, in a directory of the same name as this one.

    Commands and environments go through ssh's stdin, so that they need no quoting and do not appear in lists of
    processes.

    Args:
        command: argv of each process.
        hosts: the hosts, with their numbers of processes.
        contract: values that all processes share.
        environment: variables for each process.
        python: path of Python on the hosts.
        ssh: command that reaches a host.

    Raises:
        LaunchError: `ssh` is empty or has an unclosed quote.
    """
    reach = _words_of(ssh)
    count = sum(host.processes for host in hosts)
    places = [host for host in hosts for _ in range(host.processes)]
    guard = f"exec {shlex.quote(python)} -m ttpu_launch.guard"
    return [
        replace(
            own_task(str(number), command, replace(contract, num_processes=count, process_id=number), environment),
            guard=(*reach, host.name, guard),
            host=host.name,
        )
        for number, host in enumerate(places)
    ]


def hosts_of(text: str, processes: int) -> list[Host]:
    """Parse hosts written as "a,b,user@c"."""
    return _checked([Host(name.strip(), processes) for name in text.split(",") if name.strip()], f"--hosts {text!r}")


def hosts_in(path: Path, processes: int) -> list[Host]:
    """Read hosts from a file, one per line. `slots=N` sets another number of processes, and `#` begins a comment.

    Raises:
        LaunchError: the file cannot be read, a line is malformed, or a host appears twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LaunchError(f"the host file {path} cannot be read ({reason}): pass a text file.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and slots is None):
            raise LaunchError(
                f"line {number} of the host file {path} is {line.strip()!r}, but a host and at most slots=N are "
                "needed, as in 'tpu-a slots=2': correct it."
            )
        hosts.append(Host(words[0], int(slots[1]) if slots else processes))
    return _checked(hosts, f"--hostfile {path}")


def coordinator_of(hosts: Sequence[Host], coordinator: str | None) -> str:
    """The address of process 0: the first host, unless HOST, HOST:PORT or :PORT says otherwise.

    Raises:
        LaunchError: `coordinator` is malformed, or the first host has a name such as localhost that other hosts
            would resolve to themselves.
    """
    match = re.fullmatch(r"(\[[^\]\s]+\]|[^:\s]*)(?::(\d+))?", coordinator or "")
    if match is None:
        raise LaunchError(
            f"--coordinator {coordinator!r} was given, but HOST, HOST:PORT or :PORT is needed, as in 10.0.0.2:8476 or "
            "[fd00::1]:8476: correct it."
        )
    address = match[1] or hosts[0].address
    if address in LOCAL_NAMES and len({host.address for host in hosts}) > 1 and not match[1]:
        raise LaunchError(
            f"process 0 would listen at {address!r}, but the other hosts resolve that name to themselves: name the "
            "first host as the others know it, or pass --coordinator HOST:PORT."
        )
    if ":" in address and not address.startswith("["):
        address = f"[{address}]"  # the first host was named by its IPv6 address
    return f"{address}:{match[2] or DEFAULT_PORT}"


def free_port() -> int:
    """An unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked_for(variables: Iterable[str]) -> dict[str, str | None]:
    """Parse NAME=VALUE and NAME: name → value, or None if the value is taken from the environment later.

    Raises:
        LaunchError: NAME is not a name of a variable.
    """
    result: dict[str, str | None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise LaunchError(f"--env {text!r} was given, but a variable's name has letters, digits and _: correct it.")
        result[name] = value if equals else None
    return result


def passed_on(variables: Mapping[str, str | None], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of variables for processes that are started now. A variable without a value gets this process's value.

    Raises:
        LaunchError: the variable is not set here.
    """
    unset = [name for name, value in variables.items() if value is None and name not in environment]
    if unset:
        raise LaunchError(
            f"--env {unset[0]} was given, but {unset[0]} is not set here: write --env {unset[0]}=VALUE, or set it."
        )
    return {name: environment[name] if value is None else value for name, value in variables.items()}


def usual_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's variables that a process on another machine needs to behave the same."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


def directory() -> str:
    """The working directory, by the name under which the shell entered it. Other machines may lack the targets of
    its links."""
    here, named = Path.cwd(), Path(os.environ.get("PWD", ""))
    return str(named if named.is_absolute() and named.is_dir() and named.samefile(here) else here)


def _words_of(ssh: str) -> list[str]:
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise LaunchError(
            f"--ssh {ssh!r} was given, but a quote or escape in it is not closed ({str(error).lower()}): correct it."
        ) from error
    if not words:
        raise LaunchError(
            f"--ssh {ssh!r} was given, but it is empty: pass a command that takes a host and what to run there, as in "
            f"{DEFAULT_SSH!r}, or leave it out."
        )
    return words


def _checked(hosts: list[Host], given: str) -> list[Host]:
    if not hosts:
        raise LaunchError(f"{given} was given, but it names no host: name at least one, as in --hosts tpu-a,tpu-b.")
    bad = [host.name for host in hosts if not re.fullmatch(r"[\w.@:%-]+", host.name) or host.name.startswith("-")]
    if bad:
        raise LaunchError(f"{given} was given, but {bad[0]!r} in it is not the name of a host: correct it.")
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaunchError(
            f"{given} was given, but {twice[0]} is there twice: name each host once, and say with --nproc-per-node or "
            "slots=N how many processes it runs."
        )
    return hosts
