"""The proof of a plan. In: an architecture and a plan for slices that need not be there; out: what the TPU compiler
says of each of its programs. What was compiled once is remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.plan.plan import Plan, ProgramEstimate
from ttpu_core.plan.verification import Verification
from ttpu_jax.aot.report import ProgramReport, compile_report
from ttpu_jax.aot.topology import tpu_topology

CACHE_VARIABLE = "XDG_CACHE_HOME"


def verify_plan(
    architecture: Architecture, plan: Plan, *, progress: Callable[[str], None] | None = None
) -> tuple[Verification, ...]:
    """Compiles the plan's programs for its slices, or finds what was said of them before.

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
    if workload.quantization is not None:
        raise UnsupportedError(
            f"verifying a plan in {workload.quantization} was asked for, but this backend compiles programs of float "
            "weights: leave the quantization or --verify out."
        )
    remembered = cache_file(architecture, plan, program)
    if (found := _read(remembered)) is not None:
        return found
    if progress is not None:
        progress(workload.task)
    try:
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
        )
    except UnsupportedError as error:
        if "HBM" not in str(error):
            raise
        result = Verification(workload.task, None, 0.0, (), 0.0, _compiler(), refused=str(error))
    else:
        result = _verification(report)
    _write(remembered, result)
    return result


def cache_file(architecture: Architecture, plan: Plan, program: ProgramEstimate) -> Path:
    """Where the answer is remembered: $XDG_CACHE_HOME or ~/.cache, then ttpu/plans, by all that the program depends
    on."""
    workload = program.workload
    spec = architecture.spec
    described = [getattr(spec, name) for name in spec.__dataclass_fields__]
    key = repr((described, plan.topology, plan.mesh, plan.dcn, plan.strategy, workload, _compiler(), _ours()))
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "ttpu" / "plans"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _verification(report: ProgramReport) -> Verification:
    return Verification(
        task=report.task,
        peak_bytes=report.peak_bytes,
        seconds=report.predicted_seconds,
        collectives=tuple((one.op, one.count, one.result_bytes) for one in report.collectives),
        compile_seconds=report.compile_seconds,
        compiler=_compiler(),
    )


def _compiler() -> str:
    return f"libtpu {metadata.version('libtpu')} (jax {jax.__version__})"


def _ours() -> str:
    return metadata.version("ttpu-jax")


def _read(path: Path) -> Verification | None:
    """What is remembered; anything unreadable is as good as nothing."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        exchanged = tuple((str(op), int(count), int(size)) for op, count, size in value.pop("collectives"))
        return replace(Verification(**value, collectives=exchanged), cached=True)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, verification: Verification) -> None:
    """Remember; a folder that cannot be written to costs a compilation next time, and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            json.dump(asdict(verification), file)
        Path(file.name).replace(path)
    except OSError:
        return
