"""Cloud TPU slices: the contract of a slice's worker, and the gcloud command that runs a command on every worker."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, DEFAULT_TIMEOUT, Contract
from ttpu_launch.options import DEFAULT_GRACE, own_options


def pod_contract(timeout: int = DEFAULT_TIMEOUT) -> Contract:
    """The contract of every worker. The TPU runtime knows the rest."""
    return Contract(AUTO, timeout=timeout)


def worker_label(environment: Mapping[str, str]) -> str:
    """Prefix of a worker's output lines: its number in the slice if the environment has it (GKE), else its host's
    name. The slice's number precedes it if there are several slices."""
    worker = environment.get("TPU_WORKER_ID") or socket.gethostname()
    several = environment.get("MEGASCALE_NUM_SLICES", "1") not in ("", "1")
    return f"{environment.get('MEGASCALE_SLICE_ID', '?')}.{worker}" if several else worker


def gcloud_command(
    command: Sequence[str],
    name: str,
    *,
    zone: str,
    project: str | None = None,
    directory: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: int = DEFAULT_TIMEOUT,
    grace: float = DEFAULT_GRACE,
    backend: str | None = None,
) -> list[str]:
    """An argv that runs `ttpu launch --tpu-pod -- command` on all workers of a slice. The command line contains the
    values of `environment`.

    Args:
        command: the command that each worker runs.
        name: name of the slice.
        zone: zone of the slice.
        project: project of the slice; None uses gcloud's default.
        directory: working directory on the workers; None is the home directory.
        environment: variables for the command.
        timeout: seconds that a process waits for the others.
        grace: seconds from SIGTERM to SIGKILL.
        backend: the backend that the processes run, or None.

    Raises:
        LaunchError: `name` is not a name of a TPU.
    """
    if not name or name.startswith("-"):
        raise LaunchError(
            f"--tpu-name {name!r} was given, but it is not a name of a TPU: pass one that `gcloud compute tpus tpu-vm "
            "list` shows."
        )
    launch = shlex.join(["ttpu", "launch", "--tpu-pod", *own_options(timeout, grace, backend), "--", *command])
    variables = "".join(f"{key}={shlex.quote(value)} " for key, value in (environment or {}).items())
    enter = f"cd {shlex.quote(directory)} && " if directory else ""
    return [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", name),
        f"--zone={zone}",
        *([f"--project={project}"] if project else []),
        "--worker=all",
        f"--command={enter}{variables}{launch}",
    ]
