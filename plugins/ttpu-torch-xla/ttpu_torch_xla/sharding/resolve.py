"""Resolves how a model is sharded over devices. It takes a strategy, a mesh or a plan, at most one of them, and returns
a `Parallelism` on the runtime's devices, or None for one device. "auto" asks the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ttpu_core.checkpoint import DTYPES
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.loading import Purpose
from ttpu_core.registry import default_registry
from ttpu_core.services import Planner, Quantization
from ttpu_core.sharding.hardware import chip_named
from ttpu_core.sharding.parallelism import AUTO, Parallelism, Rules, resolve_parallelism, strategy_with
from ttpu_core.sharding.request import STAND_IN, refuse_idle_axes, the_one_given, topology_of
from ttpu_core.sharding.strategy import MeshAxes, Strategy, usual_strategy
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_torch_xla.launching import CPU_DEVICES as SIMULATED_BY
from ttpu_torch_xla.runtime import TorchRuntime

PADDED = frozenset({axes.VOCAB, axes.LOOKED_UP, axes.MLP})
"""Logical axes that need not divide: XLA pads the last device's part, and nothing is computed head by head or expert by
expert there."""


def resolve(
    spec: ArchitectureSpec,
    runtime: TorchRuntime,
    *,
    parallelism_strategy: Any = None,
    sharding_strategy: Any = None,
    mesh: Any = None,
    plan: Any = None,
    sharding_rules: Rules | None = None,
    dtype: Any = "auto",
    quantization: Quantization | None = None,
    purpose: Purpose = "generate",
) -> Parallelism | None:
    """Return the parallelism that a caller asks for; None for no request, or for one device.

    Args:
        parallelism_strategy: what `resolve_parallelism` reads, or "auto".
        sharding_strategy: the same.
        mesh: the same, or a `Parallelism`.
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        sharding_rules: logical axis → mesh axes, in place of the usual ones.
        dtype: what weights are held in, by name or as torch's; "auto" is not known yet, and counts as bfloat16.
        quantization: what they are quantized to: "int8", "int4" or None.
        purpose: what the model is opened for.

    Raises:
        RequestError: more than one of them, something else than these, or rules without any of them.
        PlanError: the plan is damaged, or was made for another model.
        UnsupportedError: what these devices cannot do, sizes that they do not divide, or an axis along which nothing
            of this model is sharded.

    Warns of a plan that was made for smaller weights.
    """
    given = the_one_given(
        sharding_rules,
        parallelism_strategy=parallelism_strategy,
        sharding_strategy=sharding_strategy,
        mesh=mesh,
        plan=plan,
    )
    if given is None:
        return None
    name, asked = given
    usual = usual_strategy(trains=purpose == "train")
    devices = runtime.num_devices()
    held = str(dtype).removeprefix("torch.")
    if plan is not None:
        planner: Planner = default_registry().service("planner")
        found = planner.plan_for(
            plan, spec, dtype=held, quantization=quantization, purpose=purpose, backend="torch_xla"
        )
    elif isinstance(asked, Parallelism):
        found = replace(asked, strategy=strategy_with(sharding_rules, asked.strategy))
    elif isinstance(asked, str) and asked.strip().lower() == AUTO:
        counted = held if held in DTYPES else "bfloat16"
        found = planned(spec, runtime, strategy_with(sharding_rules, usual), counted, quantization, purpose)
    elif isinstance(asked, str):
        found = resolve_parallelism(asked, devices, sharding_rules, SIMULATED_BY, name, usual)
    else:
        raise RequestError(
            f"{name} is the {type(asked).__name__} {str(asked)[:60]!r}, but text such as 'fsdp' or 'data=2,tensor=4' "
            "is needed: pass that, or None for one device."
        )
    if found.num_devices != devices:
        said = asked if isinstance(asked, str) and plan is None else str(found)
        many = "1 device" if found.num_devices == 1 else f"{found.num_devices} devices"
        raise UnsupportedError(
            f"{name} asks for the mesh {said!r}, which is {many}, but torch_xla runs one program on all {devices} that "
            f"there are: use all of them (on a CPU, {SIMULATED_BY} says how many are simulated), or leave {name} out "
            "for one."
        )
    if devices == 1:
        return None
    busy = check(spec, dict(found.mesh), found.strategy)
    refuse_idle_axes(spec.model_type, dict(found.mesh), busy)
    return found


def check(spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy) -> set[str]:
    """Check that a mesh divides every dimension that cannot be padded here, and return the mesh axes that shard
    anything.

    Raises:
        UnsupportedError: a number of heads or experts, or another size, that the mesh does not divide.
    """
    table = dict(strategy.rules)
    busy = {a for axis in (axes.BATCH, axes.SEQUENCE) for a in table.get(axis, ()) if mesh.get(a, 1) > 1}
    for path, parameter in spec.parameters.items():
        merged = [((axis, size),) if axis else () for axis, size in zip(parameter.axes, parameter.shape, strict=True)]
        for mesh_axes in partition_spec_of(merged, mesh, strategy, path):
            busy.update(mesh_axes)
    return busy


def partition_spec_of(
    dimensions: Iterable[tuple[tuple[str, int], ...]], mesh: Mapping[str, int], strategy: Strategy, name: str
) -> tuple[MeshAxes, ...]:
    """Return the mesh axes that shard each dimension of a parameter; () for a dimension that is whole on every device.

    Args:
        dimensions: for each of them the logical axes that it merges, the slowest-varying first, with their numbers: the
            first that the strategy shards is sharded.
        name: what an error calls the parameter.

    Raises:
        UnsupportedError: a number that the mesh does not divide, with those that it could.
    """
    free = dict(mesh)
    result: list[MeshAxes] = []
    for merged in dimensions:
        found: MeshAxes = ()
        for axis, count in merged:
            count = 0 if axis in PADDED else count  # a multiple of every number of devices
            (found,) = strategy.mesh_axes((axis,), (count,), free, name)
            if found:
                break
        for mesh_axis in found:
            free[mesh_axis] = 1
        result.append(found)
    return tuple(result)


def planned(
    spec: ArchitectureSpec,
    runtime: TorchRuntime,
    strategy: Strategy,
    dtype: str,
    quantization: Quantization | None,
    purpose: Purpose,
) -> Parallelism:
    """Ask the planner for the fastest mesh of these devices that divides the heads, which this backend does not pad.

    Args:
        spec: the architecture.
        runtime: has the devices.
        strategy: the mesh axes that shard each logical axis.
        dtype: of weights and activations.
        quantization: of the layers' weights.
        purpose: what the model is opened for.

    Raises:
        MissingDependencyError: the planner is not installed.
        UnsupportedError: the model fits on no mesh.
    """
    planner: Planner = default_registry().service("planner")
    devices = runtime.num_devices()
    topology = topology_of(chip_named(runtime.chip() or STAND_IN), devices, runtime.num_slices())
    if topology is None or devices == 1:
        return Parallelism(strategy=strategy)

    def accepts(one: Parallelism) -> bool:
        # What shards the sequence exchanges keys and values by ring attention, which is the JAX backend's, and so is
        # what gathers tokens for experts that other rules shard along the rows' axes.
        usual = one.strategy == strategy
        return dict(one.mesh).get("sequence", 1) == 1 and usual and _divides(spec, one)

    found = planner.fastest_mesh(
        spec,
        topology,
        strategy=strategy,
        dtype=dtype,
        quantization=quantization,
        purpose=purpose,
        accepts=accepts,
    )
    if found is None:
        raise UnsupportedError(
            f"a mesh of {devices} devices was to be chosen for {spec.model_type}, but none divides its heads, which "
            "the torch_xla backend does not pad: take another number of devices, or backend='jax', which pads them."
        )
    return found


def _divides(spec: ArchitectureSpec, one: Parallelism) -> bool:
    try:
        check(spec, dict(one.mesh), one.strategy)
    except UnsupportedError:
        return False
    return True
