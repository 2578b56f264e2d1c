"""The launcher's options: their defaults, and which place reads which option. `check_options` refuses an option that
a place would ignore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ttpu_core.errors import LaunchError
from ttpu_core.processes import DEFAULT_TIMEOUT

DEFAULT_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL."""

DEFAULT_SSH = "ssh -T -o BatchMode=yes -o ServerAliveInterval=15"
"""The default ssh command: no terminal, no questions, and a dead connection is detected within three times 15 s."""

HERE, HOSTS, SLURM, WORKER, SLICE = "here", "hosts", "slurm", "worker", "slice"
SLURM_SCRIPT, GKE = "slurm-script", "gke"
SPOKEN: Mapping[str, str] = MappingProxyType(
    {
        HOSTS: "--hosts or --hostfile",
        SLURM: "--slurm",
        WORKER: "--tpu-pod",
        SLICE: "--tpu-pod and --tpu-name",
        SLURM_SCRIPT: "--slurm-script",
        GKE: "--gke",
    }
)
"""Options that select a place. Without any, processes run on this machine."""

PLACES = (HERE, *SPOKEN)
FILES = (SLURM_SCRIPT, GKE)

READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # selection of the place
        "hosts": (HOSTS,),
        "hostfile": (HOSTS,),
        "slurm": (SLURM,),
        "tpu_pod": (WORKER, SLICE),
        "slurm_script": (SLURM_SCRIPT,),
        "gke": (GKE,),
        # the command; at other places SLURM, GKE or the slice sets the number of processes
        "command": PLACES,
        "backend": PLACES,
        "nproc_per_node": (HERE, HOSTS, SLURM_SCRIPT),
        "devices_per_process": (HERE, HOSTS, SLURM, SLURM_SCRIPT),
        "env": PLACES,
        "timeout": PLACES,
        "grace": PLACES,
        "dry_run": PLACES,
        "restarts": (HERE, HOSTS),
        # access to a place
        "ssh": (HOSTS,),
        "python": (HOSTS,),
        "coordinator": (HOSTS,),
        "tpu_name": (SLICE,),
        "zone": (SLICE,),
        "project": (SLICE,),
        "workdir": (SLICE,),
        # contents of a file
        "name": FILES,
        "force": FILES,
        "nodes": (SLURM_SCRIPT,),
        "time": (SLURM_SCRIPT,),
        "partition": (SLURM_SCRIPT,),
        "sbatch": (SLURM_SCRIPT,),
        "topology": (GKE,),
        "image": (GKE,),
        "secret": (GKE,),
        "namespace": (GKE,),
        "max_restarts": (GKE,),
        "chips_per_host": (GKE,),
    }
)
"""The places that read an option, by its parameter name."""


def check_options(given: Iterable[str], place: str) -> None:
    """Refuse options that this place does not read. `given` are parameter names.

    Raises:
        LaunchError: the place does not read one of them.
    """
    for name in given:
        if place not in READ_BY[name]:
            owners = [SPOKEN[owner] for owner in READ_BY[name] if owner != HERE]
            here = ["on this machine"] if HERE in READ_BY[name] else []
            where = " or ".join([*here, f"with {' or '.join(owners)}"])
            asked = f"with {SPOKEN[place]}" if place in SPOKEN else "for processes on this machine"
            raise LaunchError(
                f"--{name.replace('_', '-')} was given {asked}, but it is read only {where}: leave it out, or launch "
                "there."
            )


def own_options(timeout: int, grace: float, backend: str | None = None) -> list[str]:
    """Options that are passed to a launch on another machine, if they differ from the defaults."""
    runs = [] if backend is None else ["--backend", backend]
    waits = [] if timeout == DEFAULT_TIMEOUT else ["--timeout", str(timeout)]
    return runs + waits + ([] if grace == DEFAULT_GRACE else ["--grace", f"{grace:g}"])
