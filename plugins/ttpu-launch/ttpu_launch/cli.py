"""`ttpu launch`: runs a command as several processes on this machine, on hosts over ssh, in a SLURM job or on a TPU
slice, and prefixes their output lines with their numbers. With --slurm-script or --gke it writes a file for
another launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttpu_core.cli.commands import CONTEXT_SETTINGS
from ttpu_core.cli.console import note
from ttpu_core.errors import LaunchError
from ttpu_core.processes import DEFAULT_TIMEOUT
from ttpu_launch.options import DEFAULT_GRACE, DEFAULT_SSH

if TYPE_CHECKING:
    from ttpu_core.sharding.hardware import Topology
    from ttpu_launch.supervisor import Task

app = typer.Typer(add_completion=False, context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Ends of the names of variables whose values are not printed."""

WHERE, FILES, PROCESSES = "Where", "Files for other launchers", "Processes"


@app.command("launch", context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False})
def launch(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What each process runs: ttpu, or a script.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=1, metavar="N", help="Processes per host.", rich_help_panel=PROCESSES)
    ] = 1,
    devices_per_process: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="Simulate M CPU devices in each process.", rich_help_panel=PROCESSES),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The backend that they run: sets its variables.", rich_help_panel=PROCESSES),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Pass a variable; repeat.", rich_help_panel=PROCESSES),
    ] = None,
    timeout: Annotated[
        int, typer.Option(min=1, metavar="S", help="Seconds a process waits for the others.", rich_help_panel=PROCESSES)
    ] = DEFAULT_TIMEOUT,
    grace: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds from SIGTERM to SIGKILL.", rich_help_panel=PROCESSES)
    ] = DEFAULT_GRACE,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start all again if one fails.", rich_help_panel=PROCESSES)
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run, and where.", rich_help_panel=PROCESSES)
    ] = False,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Run on these hosts, by ssh.", rich_help_panel=WHERE)
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same, a host a line.", rich_help_panel=WHERE)
    ] = None,
    ssh: Annotated[
        str, typer.Option(metavar="COMMAND", help="How a host is reached.", rich_help_panel=WHERE)
    ] = DEFAULT_SSH,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python there, else this one's path.", rich_help_panel=WHERE)
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where process 0 listens, else the first host.", rich_help_panel=WHERE),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="This is a task of srun: take its number.", rich_help_panel=WHERE)
    ] = False,
    tpu_pod: Annotated[
        bool, typer.Option("--tpu-pod", help="This is a worker of a TPU slice.", rich_help_panel=WHERE)
    ] = False,
    tpu_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --tpu-pod: run on all workers of this slice.", rich_help_panel=WHERE),
    ] = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Of that slice.", rich_help_panel=WHERE)] = None,
    project: Annotated[str | None, typer.Option(metavar="ID", help="Of that slice.", rich_help_panel=WHERE)] = None,
    workdir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory on its workers, else home.", rich_help_panel=WHERE)
    ] = None,
    slurm_script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a script for sbatch.", rich_help_panel=FILES)
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes of that job.", rich_help_panel=FILES)] = 1,
    time: Annotated[
        str | None, typer.Option(metavar="HH:MM:SS", help="Time limit of that job.", rich_help_panel=FILES)
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Partition of that job.", rich_help_panel=FILES)
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="More of sbatch's options; repeat.", rich_help_panel=FILES),
    ] = None,
    gke: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JobSet for kubectl.", rich_help_panel=FILES)
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="CHIP:SIZE", help="Its slices: v5e:4x4, 2*v5e:4x4.", rich_help_panel=FILES)
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Its image, which has ttpu.", rich_help_panel=FILES)
    ] = None,
    secret: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its Secret, for --env NAME.", rich_help_panel=FILES)
    ] = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Its namespace.", rich_help_panel=FILES)] = "default",
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often it begins anew.", rich_help_panel=FILES)
    ] = 0,
    chips_per_host: Annotated[
        int | None, typer.Option(metavar="N", help="1, 4 or 8, else the usual.", rich_help_panel=FILES)
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job.", rich_help_panel=FILES)] = "ttpu",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.", rich_help_panel=FILES)] = False,
) -> None:
    """Run a command as several processes that form one mesh.

    Each process sees the devices of all, so that --mesh, or the mesh of a script,
    may span them. Lines come behind the number of their process; the first
    process that fails ends the rest, and its exit code is this command's. What is
    written to stdin is not passed on. On one machine the devices are simulated on
    its CPU: one for each process, unless --devices-per-process says more.

    Examples:

      ttpu launch --nproc-per-node 2 --devices-per-process 4 -- \\
          ttpu generate ./llama --prompt Hi --mesh fsdp=4,tensor=2
      ttpu launch --hosts tpu-a,tpu-b -- train.py --steps 100
      ttpu launch --tpu-pod --tpu-name slice --zone us-east5-b -- train.py
      srun --kill-on-bad-exit=1 ttpu launch --slurm -- train.py
      ttpu launch --slurm-script job.sh --nodes 4 --time 2:00:00 -- train.py
      ttpu launch --gke job.yaml --topology 2*v5e:4x4 --image registry.example/ttpu:1 \\
          -- ttpu generate /models/llama --prompt Hi --mesh data=2,tensor=16
    """
    from ttpu_core.processes import Contract
    from ttpu_launch import options, places
    from ttpu_launch.backends import LaunchedBackend
    from ttpu_launch.command import argv_of, check_command

    words = tuple(command or ())
    check_command(words)
    _one_of(
        {
            "--hosts": hosts,
            "--hostfile": hostfile,
            "--slurm": slurm,
            "--tpu-pod": tpu_pod,
            "--slurm-script": slurm_script,
            "--gke": gke,
        }
    )
    place = options.HERE
    if hosts is not None or hostfile is not None:
        place = options.HOSTS
    elif slurm:
        place = options.SLURM
    elif tpu_pod:
        place = options.WORKER if tpu_name is None else options.SLICE
    elif slurm_script is not None:
        place = options.SLURM_SCRIPT
    elif gke is not None:
        place = options.GKE
    options.check_options(_given(ctx), place)
    runs = LaunchedBackend(backend)
    runs.check_processes(nproc_per_node)
    asked = places.asked_for(env or ())

    if gke is not None:
        from ttpu_launch.gke import JobSet

        job = JobSet(
            words,
            *_slice_and_image(topology, image),
            name=name,
            namespace=namespace,
            restarts=max_restarts,
            chips_per_host=chips_per_host,
            environment=tuple(asked.items()),
            secret=secret,
            timeout=timeout,
            grace=grace,
            backend=runs.passed_on,
        )
        _write(gke, job.yaml(), force, dry_run, asked, executable=False, then=["kubectl", "apply", "-f", str(gke)])
        return
    if slurm_script is not None:
        from ttpu_launch.slurm import BatchScript

        said = {**os.environ, **{variable: value for variable, value in asked.items() if value is not None}}
        # Or every task fails.
        runs.variables_for(nodes * nproc_per_node, devices_per_process, said, on_tpu_worker=False)
        script = BatchScript(
            words,
            places.directory(),
            nodes,
            processes_per_node=nproc_per_node,
            name=name,
            time=time,
            partition=partition,
            local_devices=devices_per_process,
            timeout=timeout,
            grace=grace,
            backend=runs.passed_on,
            environment=tuple(asked.items()),
            options=tuple(sbatch or ()),
        )
        then = ["sbatch", str(slurm_script)]
        _write(slurm_script, script.text(), force, dry_run, asked, executable=True, then=then)
        return

    variables = places.passed_on(asked, os.environ)

    def own_variables(processes: int, local_devices: int | None) -> dict[str, str]:
        given = {**os.environ, **variables}
        on_worker = place == options.WORKER
        return {**variables, **runs.variables_for(processes, local_devices, given, on_tpu_worker=on_worker)}

    if tpu_name is not None:
        if dry_run:  # do not show values that come from the environment
            variables = {name: f"<{name}>" if asked[name] is None else value for name, value in variables.items()}
        tasks = [_on_all_workers(words, tpu_name, zone, project, workdir, variables, timeout, grace, runs.passed_on)]
        if dry_run:
            print(shlex.join(tasks[0].command))
            return
        if variables:
            note(f"{_values_of(variables)} can be read in lists of processes, here and on the workers: gcloud's "
                 "command holds it")  # fmt: skip
    elif tpu_pod:
        from ttpu_launch.tpu_pod import pod_contract, worker_label

        contract = pod_contract(timeout)
        tasks = [places.own_task(worker_label(os.environ), argv_of(words), contract, own_variables(1, None))]
    elif slurm:
        from ttpu_launch.slurm import slurm_contract, tasks_per_node

        runs.check_processes(tasks_per_node(os.environ))
        contract = slurm_contract(os.environ, local_devices=devices_per_process, timeout=timeout)
        own = own_variables(contract.num_processes or 1, devices_per_process)
        tasks = [places.own_task(str(contract.process_id), argv_of(words), contract, own)]
    elif hosts is not None or hostfile is not None:
        there = places.hosts_in(hostfile, nproc_per_node) if hostfile else places.hosts_of(hosts or "", nproc_per_node)
        address = places.coordinator_of(there, coordinator)
        contract = Contract(address, local_devices=devices_per_process, timeout=timeout)
        interpreter = python or sys.executable
        processes = sum(host.processes for host in there)
        runs.check_processes(max(host.processes for host in there))
        passed = {**places.usual_variables(os.environ), **own_variables(processes, devices_per_process)}
        tasks = places.ssh_tasks(argv_of(words, interpreter), there, contract, passed, python=interpreter, ssh=ssh)
    else:
        simulated = devices_per_process or (1 if nproc_per_node > 1 else None)
        contract = Contract(f"127.0.0.1:{places.free_port()}", local_devices=simulated, timeout=timeout)
        own = own_variables(nproc_per_node, simulated)
        tasks = places.local_tasks(argv_of(words), nproc_per_node, contract, own)
    if dry_run:
        for task in tasks:
            print(_as_line(task, asked, runs.variables))
        return
    raise typer.Exit(_run(tasks, restarts, grace))


def _run(tasks: Sequence[Task], restarts: int, grace: float) -> int:
    if os.name != "posix":
        raise LaunchError("processes were to be started here, but that needs POSIX process groups: use Linux.")
    if not hasattr(os, "waitid"):
        raise LaunchError(
            "processes were to be started here, but this Python has no os.waitid, which needs Python 3.13 on macOS: "
            "use that, or Linux."
        )
    from ttpu_core.processes import COORDINATOR, RESTART
    from ttpu_launch.places import free_port
    from ttpu_launch.supervisor import supervise

    def tasks_of(number: int) -> Sequence[Task]:
        if number == 0:
            return tasks
        more = {RESTART: str(number)}
        if tasks[0].environment.get(COORDINATOR, "").startswith("127.0.0.1:"):
            more[COORDINATOR] = f"127.0.0.1:{free_port()}"  # the one before may still be closing
        return [replace(task, environment={**task.environment, **more}) for task in tasks]

    return supervise(tasks_of, restarts, grace)


def _on_all_workers(
    words: tuple[str, ...],
    tpu_name: str,
    zone: str | None,
    project: str | None,
    workdir: str | None,
    variables: Mapping[str, str],
    timeout: int,
    grace: float,
    backend: str | None,
) -> Task:
    from ttpu_launch.places import directory
    from ttpu_launch.supervisor import Task
    from ttpu_launch.tpu_pod import gcloud_command

    if zone is None:
        raise LaunchError(f"--tpu-name {tpu_name} was given without --zone: pass the slice's zone too.")
    argv = gcloud_command(
        words,
        tpu_name,
        zone=zone,
        project=project,
        directory=workdir,
        environment=variables,
        timeout=timeout,
        grace=grace,
        backend=backend,
    )
    return Task(tpu_name, tuple(argv), {}, directory())


def _slice_and_image(topology: str | None, image: str | None) -> tuple[Topology, str]:
    from ttpu_core.sharding.hardware import parse_topology

    if topology is None or image is None:
        missing = _and(name for name, value in (("--topology", topology), ("--image", image)) if value is None)
        raise LaunchError(
            f"--gke was given without {missing}: pass the slice, as in v5e:4x4, and an image that has ttpu installed."
        )
    return parse_topology(topology), image


def _write(
    path: Path,
    text: str,
    force: bool,
    dry_run: bool,
    variables: Mapping[str, str | None],
    *,
    executable: bool,
    then: Sequence[str],
) -> None:
    if dry_run:
        print(text, end="")
        return
    from ttpu_launch.files import write_whole

    held = [name for name, value in variables.items() if value is not None]
    write_whole(path, text, replace=force, executable=executable, private=bool(held))
    alone = f", and can be read by you alone: it holds {_values_of(held)}" if held else ""
    note(f"{path} is written{alone}; next: {shlex.join(then)}")


def _given(ctx: typer.Context) -> list[str]:
    """The parameters that stand on the command line, in the order of the help."""
    names = [str(parameter.name) for parameter in ctx.command.params]
    return [name for name in names if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)


def _values_of(names: Collection[str]) -> str:
    return f"the value{'s'[: len(names) != 1]} of {_and(names)}"


def _one_of(places: Mapping[str, object]) -> None:
    given = [option for option, value in places.items() if value not in (None, False)]
    if len(given) > 1:
        raise LaunchError(f"{_and(given)} were given, but a command runs in one place: leave out all but one.")


def _as_line(task: Task, asked: Mapping[str, str | None], of_backend: Collection[str]) -> str:
    """What a task runs, with its variables. Variables that a launch empties are left out. A value of the environment
    that may be secret is not shown, but its variable's name in its place."""

    def shown(name: str, value: str) -> str:
        may_be_secret = asked[name] is None if name in asked else name.endswith(SECRET)
        hidden = may_be_secret and name not in of_backend
        return f"{name}={shlex.quote(f'<{name}>' if hidden else value)}"

    words = [shown(name, value) for name, value in task.environment.items() if value or name in asked]
    return " ".join([f"[{task.label}]{f' on {task.host}' if task.host else ''}", *words, shlex.join(task.command)])
