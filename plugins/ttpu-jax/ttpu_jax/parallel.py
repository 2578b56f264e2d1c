"""How a caller says that a model is to be cut over devices. In: a strategy, a mesh, or a plan, of which one is given;
out: a `Placement` on the devices that are there. "auto" asks the planner."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Any

import jax

from ttpu_core import axes
from ttpu_core.errors import PlanError, RequestError, UnsupportedError
from ttpu_core.plan.hardware import Topology, chip_named, chip_of_device_kind, slice_sizes
from ttpu_core.plan.parallelism import AUTO, Parallelism, Rules, resolve_parallelism, strategy_with
from ttpu_core.plan.plan import Plan, load_plan
from ttpu_core.plan.planner import Request, best_plan
from ttpu_core.plan.workload import BITS
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.params.mesh import number_of_slices
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import Placement, local_placement

STAND_IN = "v5p"
"""The chip whose figures "auto" takes where the devices are no TPUs: one with much memory."""


def placement_for(
    spec: ArchitectureSpec,
    *,
    parallelism_strategy: Any = None,
    sharding_strategy: Any = None,
    mesh: Any = None,
    plan: Any = None,
    sharding_rules: Rules | None = None,
    dtype: str = "bfloat16",
) -> Placement:
    """The placement that a caller asks for; one device where nothing is.

    Args:
        parallelism_strategy: what `resolve_parallelism` reads, or "auto".
        sharding_strategy: the same.
        mesh: the same, or a jax Mesh.
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        sharding_rules: logical axis → mesh axes, in place of the usual ones.
        dtype: what weights are held in.

    Raises:
        RequestError: more than one of them.
        PlanError: the plan is damaged, or was made for another model or for quantized weights.
        UnsupportedError: what these devices cannot do, or an axis along which nothing of this model is cut.

    Warns of a plan that was made for smaller weights.
    """
    given = {
        name: value
        for name, value in (
            ("parallelism_strategy", parallelism_strategy),
            ("sharding_strategy", sharding_strategy),
            ("mesh", mesh),
            ("plan", plan),
        )
        if value is not None
    }
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} were given, but each of them says how the model is cut: pass one of them."
        )
    if plan is not None:
        if sharding_rules:
            raise RequestError("plan and sharding_rules were given, but a plan has its own rules: pass one of them.")
        read = _read(plan)
        read.check(spec)
        _check_weights(read, dtype)
        return local_placement(read.parallelism)
    strategy = strategy_with(sharding_rules)
    asked = next(iter(given.values()), None)
    if isinstance(asked, str) and asked.strip().lower() == AUTO:
        return local_placement(planned(spec, jax.devices(), Request(strategy=strategy, dtype=dtype)))
    if isinstance(asked, str):
        asked = resolve_parallelism(asked, len(jax.devices()), sharding_rules)
    placement = local_placement(asked, strategy)
    _refuse_idle_axes(spec, placement)
    return placement


def planned(spec: ArchitectureSpec, devices: list[jax.Device], request: Request) -> Parallelism:
    """The planner's fastest mesh for these devices, which are taken for slices that have as many.

    Raises:
        UnsupportedError: the model fits in no way.
    """
    chip = chip_of_device_kind(devices[0].device_kind) or chip_named(STAND_IN)
    if len(devices) < chip.devices_per_chip:  # of a tpu7x chip that several processes share, one core
        return Parallelism(strategy=request.strategy)
    slices = number_of_slices(devices)
    count = len(devices) // chip.devices_per_chip // slices
    flat = (*(1 for _ in range(chip.dimensions - 1)), count)
    size = next((size for size in slice_sizes(chip) if Topology(chip, size).num_chips == count), flat)
    return best_plan(spec, Topology(chip, size, slices), request).parallelism


def _check_weights(plan: Plan, dtype: str) -> None:
    """That the plan's weights are those that are loaded."""
    for program in plan.programs:
        workload = program.workload
        if workload.quantization is not None:
            raise PlanError(
                f"the plan is for {workload.quantization} weights, but the JAX backend loads them in {dtype}: make a "
                "plan without --quantization."
            )
        if BITS[workload.dtype] < BITS.get(dtype, 32):
            warnings.warn(
                f"the plan was made for weights in {workload.dtype}, but they are held in {dtype}, which takes more "
                f"memory than it says: pass dtype={workload.dtype!r}",
                stacklevel=3,
            )
            return


def _refuse_idle_axes(spec: ArchitectureSpec, placement: Placement) -> None:
    """Devices along an axis that cuts neither parameters nor tokens would all compute the same."""
    if placement.mesh is None:
        return
    sizes = dict(placement.mesh.shape)
    padded, _ = pad_for(spec, placement)
    busy = {axis for logical in (axes.BATCH, axes.SEQUENCE) for axis in placement.axes_of(logical)}
    for path, parameter in padded.parameters.items():
        for cut in placement.strategy.mesh_axes(parameter.axes, parameter.shape, sizes, path):
            busy.update(cut)
    for axis, size in sizes.items():
        if size > 1 and axis not in busy:
            raise UnsupportedError(
                f"the mesh has {size} devices along {axis!r}, but nothing of this {spec.model_type} is cut along it, "
                f"so that they would all do the same: use {', '.join(sorted(busy)) or 'no mesh'} instead, or name what "
                "it cuts in sharding_rules."
            )


def _read(plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | PathLike):
        return load_plan(plan)
    raise RequestError(
        f"plan is the {type(plan).__name__} {str(plan)[:60]!r}, but a ttpu_core.plan.plan.Plan or the path of a file "
        "that `ttpu plan --save` wrote is needed: pass one of those."
    )
