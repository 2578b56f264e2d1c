"""Cloud TPU slices. In: this machine's variables; out: the contract of one of a slice's workers. In: a slice's name and
a command; out: the gcloud command that runs it on every worker."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, DEFAULT_TIMEOUT, Contract
from ttpu_launch.options import DEFAULT_GRACE, own_options


def pod_contract(timeout: int = DEFAULT_TIMEOUT) -> Contract:
    """The contract of every worker: the runtime knows the rest."""
    return Contract(AUTO, timeout=timeout)


def worker_label(environment: Mapping[str, str]) -> str:
    """What a worker's lines begin with: its number in the slice where the environment has it (GKE), else its host's
    name; with the slice's number before it where there are several."""
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
    """An argv that runs `ttpu launch --tpu-pod -- command` on all workers of the slice `name`, in `directory` or in the
    home directory. The values of `environment` stand in it."""
    if not name or name.startswith("-"):
        raise LaunchError(
            f"--tpu-name {name!r} was given, but it is no name of a TPU: see `gcloud compute tpus tpu-vm list`."
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
