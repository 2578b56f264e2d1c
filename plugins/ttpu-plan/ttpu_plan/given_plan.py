"""Checks a plan that a caller gave in place of a parallelism strategy: a `Plan`, or the file of one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from os import PathLike
from typing import Any

from ttpu_core.checkpoint import DTYPES
from ttpu_core.errors import PlanError, RequestError, UnsupportedError
from ttpu_core.loading import Purpose
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.training_state import PlannedUpdate
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.arithmetic import BITS
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_plan.plan import ENGINE_AXES, Plan
from ttpu_plan.plan_file import load_plan
from ttpu_plan.zero import stage_of


def plan_for(
    plan: Any, spec: ArchitectureSpec, *, dtype: str, quantization: str | None, purpose: Purpose, backend: str
) -> Parallelism:
    """Return the mesh of a plan that suits the model and its weights; to serve, of one replica. Warns if the plan was
    made for smaller weights, or has other replicas.

    Args:
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        spec: the model.
        dtype: dtype of the weights; a name that no plan has ("auto") is not compared.
        quantization: a shorthand of the quantization of the weights, such as int8 or w4a16-g128, or None.
        purpose: what the model is opened for.
        backend: name of the backend for error messages.

    Raises:
        RequestError: `plan` is something else.
        PlanError: the plan is damaged, or was made for another model or for weights of another kind.
        UnsupportedError: an engine is to be opened, but the plan shards along axes that engines do not.
    """
    read = _read(plan)
    if purpose == "serve":
        read = _replica(read)
    # A dense checkpoint that is quantized while it is loaded has a plan of the dense model, with a quantization.
    read.check(spec if quantization is None else replace(spec, kernel_formats=()))
    for program in read.programs:
        workload = program.workload
        if _format(workload.quantization) != _format(quantization):
            option = f"with --quantization {quantization}" if quantization else "without --quantization"
            raise PlanError(
                f"the plan is for {workload.quantization or workload.dtype} weights, but the {backend} backend loads "
                f"them in {quantization or dtype}: make a plan {option}."
            )
        if workload.task == "train":  # it counts float32 weights, whatever it computes in
            continue
        if quantization is None and dtype in DTYPES and BITS[workload.dtype] < BITS[dtype]:
            warnings.warn(
                f"the plan was made for weights in {workload.dtype}, but they are held in {dtype}, which takes more "
                f"memory than it says: pass dtype={workload.dtype!r}",
                stacklevel=4,
            )
            break
    return read.parallelism


def planned_update(plan: Any) -> PlannedUpdate:
    """Return what a plan says of the training step that it was made for.

    Args:
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.

    Raises:
        RequestError: `plan` is something else.
        PlanError: the plan is damaged, or is not one to train.
    """
    read = _read(plan)
    step = read.program("train")
    if step is None:
        raise PlanError(
            f"a plan to train was asked for, but this one for {read.topology} is to "
            f"{'serve' if read.is_served else 'generate'}: make one with `ttpu plan CHECKPOINT --task training --save "
            "PLAN.json`."
        )
    workload, mesh = step.workload, dict(read.mesh)
    stage = stage_of(mesh, read.strategy, workload.settings.zero_stage)
    settings = replace(workload.settings, zero_stage=stage)
    return PlannedUpdate(read.topology, read.parallelism, workload.batch, workload.context, settings)


def _read(plan: Any) -> Plan:
    read = load_plan(plan) if isinstance(plan, str | PathLike) else plan
    if not isinstance(read, Plan):
        raise RequestError(
            f"plan is the {type(plan).__name__} {str(plan)[:60]!r}, but a ttpu_plan.plan.Plan or the path of a file "
            "that `ttpu plan --save` wrote is needed: pass one of those."
        )
    return read


def _replica(plan: Plan) -> Plan:
    """The part of a plan that one serving engine follows."""
    others = [axis for axis, size in plan.mesh if size > 1 and axis not in ENGINE_AXES]
    if others and not plan.is_served:
        raise UnsupportedError(
            f"the engine was asked to serve by a plan for {plan.parallelism}, but an engine shards a model along "
            f"{' and '.join(ENGINE_AXES)} alone, and devices along {', '.join(others)} would all do the same: make a "
            "plan to serve with `ttpu plan CHECKPOINT --save PLAN.json`."
        )
    if plan.replicas > 1:
        warnings.warn(
            f"the plan is {plan.layout}: this engine is one of the replicas, over {plan.replica}; start one for each",
            stacklevel=5,
        )
    return replace(plan, mesh=plan.replica.mesh, dcn=plan.replica.dcn)


def _format(quantization: str | None) -> KernelFormat | None:
    return None if quantization is None else QuantizationConfig.parse(quantization).kernel_format
