"""Verifies a plan: compiles each of its programs for TPU slices that need not be there, and returns the compiler's
figures. Results are cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax

import ttpu_core
import ttpu_jax
from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.files import write_whole
from ttpu_core.quantization import quantize_architecture
from ttpu_core.sharding.request import topology_of
from ttpu_core.sharding.verification import Verification
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.aot.report import compile_report
from ttpu_jax.aot.topology import tpu_topology
from ttpu_jax.runner.planned_step import compile_planned_step

if TYPE_CHECKING:
    from ttpu_core.sharding.training_state import Recomputation
    from ttpu_plan.plan import Plan, ProgramEstimate
    from ttpu_plan.workload import Workload

CACHE_VARIABLE = "XDG_CACHE_HOME"
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
"""Environment variables that change what the compiler makes of a program."""

OURS = ("ttpu-core", "ttpu-jax")


def verify_plan(
    architecture: Architecture, plan: Plan, *, progress: Callable[[str], None] | None = None
) -> tuple[Verification, ...]:
    """Compile a plan's programs for its slices, or read the figures of an earlier compilation.

    Args:
        progress: called with the task of each program that is going to be compiled.

    Raises:
        MissingDependencyError: libtpu is not installed.
        PlanError: the plan was made for another model.
        UnsupportedError: the programs cannot be compiled at all; one that only does not fit is no error.
    """
    plan.check(architecture.spec)
    tpu_topology(plan.topology)  # says what to install, before anything is looked up
    return tuple(_verify(architecture, plan, program, progress) for program in plan.programs)


def _verify(
    architecture: Architecture, plan: Plan, program: ProgramEstimate, progress: Callable[[str], None] | None
) -> Verification:
    workload = program.workload
    if not architecture.spec.kernel_formats:
        architecture = quantize_architecture(architecture, workload.quantization)
    remembered = cache_file(architecture, plan, program)
    if (found := _read(remembered)) is not None:
        return found
    if progress is not None:
        progress(workload.task)
    try:
        result = _of_step(architecture, plan, workload) if workload.step else _of_report(architecture, plan, workload)
    except UnsupportedError as error:
        if "HBM" not in str(error):
            raise
        result = Verification(workload.task, None, 0.0, (), 0.0, _compiler(), refused=str(error))
    _write(remembered, result)
    return result


def cache_file(architecture: Architecture, plan: Plan, program: ProgramEstimate) -> Path:
    """Return the file that caches a program's figures, below $XDG_CACHE_HOME or ~/.cache in ttpu/plans. Its name
    depends on everything that the program depends on."""
    workload = program.workload
    spec = architecture.spec
    described = [getattr(spec, name) for name in spec.__dataclass_fields__]
    # What replicas run does not depend on how many there are.
    placed = (_replica_topology(plan), plan.replica.mesh) if workload.step else (plan.topology, plan.mesh, plan.dcn)
    asked = (described, placed, plan.strategy, workload)
    flags = [os.environ.get(name, "") for name in FLAGS]
    key = repr((asked, _compiler(), flags, [metadata.version(name) for name in OURS], _sources(_own_parts(spec))))
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "ttpu" / "plans"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _replica_topology(plan: Plan) -> str:
    """Slices of a plan's chip that have the devices of one replica."""
    if plan.replicas == 1:
        return plan.topology
    found = topology_of(plan.slices.chip, plan.replica.num_devices, 1)
    assert found is not None  # replicas have whole chips
    return found.name


def _of_step(architecture: Architecture, plan: Plan, workload: Workload) -> Verification:
    mesh = dict(plan.replica.mesh)
    figures = compile_planned_step(architecture, _replica_topology(plan), mesh, plan.strategy, workload)
    return Verification(
        task=workload.task,
        peak_bytes=figures.peak_bytes,
        seconds=figures.total_seconds,
        collectives=figures.collectives,
        compile_seconds=figures.compile_seconds,
        compiler=_compiler(),
    )


def _of_report(architecture: Architecture, plan: Plan, workload: Workload) -> Verification:
    assert workload.task != "mixed"
    remat = workload.settings.remat
    report = compile_report(
        architecture,
        plan.topology,
        task=workload.task,
        batch=workload.batch,
        context=workload.context,
        dtype=workload.dtype,
        mesh=dict(plan.mesh),
        slices=dict(plan.dcn),
        strategy=plan.strategy,
        layers=workload.layers,
        remat=cast("Recomputation", "full" if remat == "auto" else remat),
    )
    return Verification(
        task=report.task,
        peak_bytes=report.peak_bytes,
        seconds=report.total_seconds,
        collectives=tuple((one.op, one.count, one.result_bytes) for one in report.collectives),
        compile_seconds=report.compile_seconds,
        compiler=_compiler(),
    )


def _compiler() -> str:
    return f"libtpu {metadata.version('libtpu')} (jax {jax.__version__})"


def _own_parts(spec: ArchitectureSpec) -> tuple[str, ...]:
    """Packages that implement parts of a model which this one does not know."""
    parts = [spec.embedding.custom, *(layer.block.custom for layer in spec.layers)]
    parts += [mixer for layer in spec.layers for mixer in layer.mixers]
    found = (part.implementation("jax") for part in parts if part is not None)
    return tuple(sorted({name.partition(".")[0].partition(":")[0] for name in found if name}))


@cache
def _sources(packages: tuple[str, ...]) -> str:
    """Hash of the files that programs are made from: in a checkout that is being edited, versions stay while programs
    change."""
    folders = [Path(str(ttpu_core.__file__)).parent, Path(str(ttpu_jax.__file__)).parent]
    for name in packages:
        found = util.find_spec(name)
        folders += [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
    return sources_hash(file for folder in folders for kind in ("*.py", "*.json") for file in folder.rglob(kind))


def sources_hash(files: Iterable[Path]) -> str:
    """Return one hash of the files' contents and names, independent of their order."""
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(repr((file.name, hashlib.sha256(file.read_bytes()).hexdigest())).encode())
    return whole.hexdigest()


def _read(path: Path) -> Verification | None:
    """What is remembered; anything unreadable is as good as nothing."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        exchanged = tuple((str(op), int(count), int(size)) for op, count, size in value.pop("collectives"))
        return replace(Verification(**value, collectives=exchanged), cached=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # the last: no object, but null or a number
        return None


def _write(path: Path, verification: Verification) -> None:
    """Remember; a folder that cannot be written to costs a compilation next time, and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(verification)))
    except OSError:
        return
