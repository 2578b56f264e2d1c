"""Checks the arguments of `from_pretrained` that say how a model is sharded. Every backend uses these functions."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from ttpu_core.errors import PlanError, RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import Chip, Topology, slice_sizes
from ttpu_core.sharding.plan import Plan
from ttpu_core.sharding.serving import ENGINE_AXES
from ttpu_core.sharding.workload import DTYPES
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.arithmetic import BITS

STAND_IN = "v5p"
"""The chip that "auto" assumes if the devices are no TPUs: one with much memory."""


def the_one_given(rules: Any, **arguments: Any) -> tuple[str, Any] | None:
    """Name and value of the one argument that is not None, or None if all are None.

    Args:
        rules: the caller's sharding rules, which need one of the arguments.
        arguments: the arguments that say how the model is sharded, by name.

    Raises:
        RequestError: more than one is given, or rules alone.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} were given, but each of them says how the model is sharded: pass one of them."
        )
    if rules and not given:
        raise RequestError(
            f"sharding_rules for {', '.join(map(str, rules))} were given, but nothing says that the model is sharded: "
            "pass a parallelism_strategy too, such as 'fsdp', or leave the rules out."
        )
    return next(iter(given.items()), None)


def plan_for(
    plan: Any, spec: ArchitectureSpec, *, dtype: str, quantization: str | None, rules: Any, backend: str
) -> Plan:
    """A plan that suits the model and its weights. Warns if the plan was made for smaller weights.

    Args:
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        spec: the model.
        dtype: dtype of the weights; a name that no plan has ("auto") is not compared.
        quantization: quantization of the weights: "int8", "int4" or None.
        rules: the caller's sharding rules, which contradict a plan.
        backend: name of the backend for error messages.

    Raises:
        RequestError: `plan` is something else, or rules are given.
        PlanError: the plan is damaged, or was made for another model or for weights of another kind.
        MissingDependencyError: it is a file, but the planner, which reads it, is not installed.
    """
    if rules:
        raise RequestError("plan and sharding_rules were given, but a plan has its own rules: pass one of them.")
    read = _read(plan)
    read.check(spec)
    for program in read.programs:
        workload = program.workload
        if workload.quantization != quantization:
            option = f"with --quantization {quantization}" if quantization else "without --quantization"
            raise PlanError(
                f"the plan is for {workload.quantization or workload.dtype} weights, but the {backend} backend loads "
                f"them in {quantization or dtype}: make a plan {option}."
            )
        if quantization is None and dtype in DTYPES and BITS[workload.dtype] < BITS[dtype]:
            warnings.warn(
                f"the plan was made for weights in {workload.dtype}, but they are held in {dtype}, which takes more "
                f"memory than it says: pass dtype={workload.dtype!r}",
                stacklevel=4,
            )
            break
    return read


def engine_plan(plan: Any) -> Plan:
    """The plan of one serving engine: of a plan to serve, one replica's part.

    Args:
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.

    Raises:
        RequestError: it is something else.
        PlanError: the plan is damaged.
        MissingDependencyError: it is a file, but the planner, which reads it, is not installed.
        UnsupportedError: it is not for serving, and shards along axes that engines do not.

    Warns of other replicas, which this engine knows nothing of.
    """
    read = _read(plan)
    others = [axis for axis, size in read.mesh if size > 1 and axis not in ENGINE_AXES]
    if others and not read.is_served:
        raise UnsupportedError(
            f"the engine was asked to serve by a plan for {read.parallelism}, but an engine shards a model along "
            f"{' and '.join(ENGINE_AXES)} alone, and devices along {', '.join(others)} would all do the same: make a "
            "plan to serve with `ttpu plan CHECKPOINT --save PLAN.json`."
        )
    if read.replicas > 1:
        warnings.warn(
            f"the plan is {read.layout}: this engine is one of the replicas, over {read.replica}; start one for each",
            stacklevel=3,
        )
    return replace(read, mesh=read.replica.mesh, dcn=read.replica.dcn)


def _read(plan: Any) -> Plan:
    is_file = isinstance(plan, str | PathLike)
    read = default_registry().service("planner").load_plan(plan) if is_file else plan
    if not isinstance(read, Plan):
        raise RequestError(
            f"plan is the {type(plan).__name__} {str(plan)[:60]!r}, but a ttpu_core.sharding.plan.Plan or the path of "
            "a file that `ttpu plan --save` wrote is needed: pass one of those."
        )
    return read


def topology_of(chip: Chip, devices: int, slices: int) -> Topology | None:
    """The topology of `devices` devices in `slices` slices, assumed to have a size that can be ordered. None for a
    part of one chip."""
    if devices < chip.devices_per_chip:
        return None
    count = devices // chip.devices_per_chip // slices
    flat = (*(1 for _ in range(chip.dimensions - 1)), count)
    size = next((size for size in slice_sizes(chip) if Topology(chip, size).num_chips == count), flat)
    return Topology(chip, size, slices)


def refuse_idle_axes(model_type: str, mesh: Mapping[str, int], busy: Collection[str]) -> None:
    """Refuse a mesh axis along which neither parameters nor tokens are sharded, because its devices would all
    compute the same.

    Args:
        model_type: the model's type, for the error message.
        mesh: mesh axis → devices along it.
        busy: mesh axes along which anything is sharded.

    Raises:
        UnsupportedError: such an axis has several devices.
    """
    for axis, size in mesh.items():
        if size > 1 and axis not in busy:
            raise UnsupportedError(
                f"the mesh has {size} devices along {axis!r}, but nothing of this {model_type} is sharded along it, so "
                f"they would all compute the same: use {', '.join(sorted(busy)) or 'no mesh'} instead, or shard a "
                "logical axis along it in sharding_rules."
            )
