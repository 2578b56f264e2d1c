"""Resolves how a model is sharded over devices. It takes a strategy, a mesh or a plan, at most one of them, and returns
a `Placement` on the available devices. "auto" asks the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from ttpu_core.errors import UnsupportedError
from ttpu_core.loading import Purpose
from ttpu_core.registry import default_registry
from ttpu_core.services import Planner
from ttpu_core.sharding.hardware import chip_named, chip_of_device_kind
from ttpu_core.sharding.parallelism import AUTO, Parallelism, Rules, resolve_parallelism, strategy_with
from ttpu_core.sharding.request import STAND_IN, refuse_idle_axes, the_one_given, topology_of
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, STAGE, Strategy, usual_strategy
from ttpu_core.spec import ArchitectureSpec, MoESpec, axes
from ttpu_jax.model.pipeline import check_stages, stages_of
from ttpu_jax.params.mesh import number_of_slices
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import Placement, local_placement


def placement_for(
    spec: ArchitectureSpec,
    *,
    parallelism_strategy: Any = None,
    sharding_strategy: Any = None,
    mesh: Any = None,
    plan: Any = None,
    sharding_rules: Rules | None = None,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    purpose: Purpose = "generate",
    by_links: bool = True,
) -> Placement:
    """Return the placement that a caller asks for; one device if the caller asks for nothing.

    Args:
        parallelism_strategy: what `resolve_parallelism` reads, or "auto".
        sharding_strategy: the same.
        mesh: the same, or a jax Mesh.
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        sharding_rules: logical axis → mesh axes, in place of the usual ones.
        dtype: what weights are held in.
        quantization: a shorthand of what they are quantized to while they are loaded.
        purpose: what the model is opened for.
        by_links: neighbours along a mesh axis are neighbours on the interconnect; else devices keep their order. A
            jax Mesh is taken as it is.

    Raises:
        RequestError: more than one of them, or rules alone.
        PlanError: the plan is damaged, or was made for another model or for weights of another format.
        UnsupportedError: a mesh that these devices cannot form, or an axis that shards nothing of this model.

    Warns of a plan that was made for smaller weights.
    """
    given = the_one_given(
        sharding_rules,
        parallelism_strategy=parallelism_strategy,
        sharding_strategy=sharding_strategy,
        mesh=mesh,
        plan=plan,
    )
    if plan is not None:
        planner: Planner = default_registry().service("planner")
        followed = planner.plan_for(
            plan, spec, dtype=dtype, quantization=quantization, purpose=purpose, backend="JAX"
        )
        return local_placement(followed, by_links=by_links)
    usual = usual_strategy(trains=purpose == "train")
    strategy = strategy_with(sharding_rules, usual)
    argument, asked = given or ("parallelism_strategy", None)
    if isinstance(asked, str) and asked.strip().lower() == AUTO:
        return local_placement(planned(spec, jax.devices(), strategy, dtype, purpose), by_links=by_links)
    if isinstance(asked, str):
        asked = resolve_parallelism(asked, len(jax.devices()), sharding_rules, argument=argument, usual=usual)
    if isinstance(asked, Parallelism) and asked.strategy == DEFAULT_STRATEGY:
        asked = replace(asked, strategy=strategy)
    placement = local_placement(asked, strategy, by_links=by_links)
    _refuse_idle_axes(spec, placement, purpose)
    return placement


def planned(
    spec: ArchitectureSpec, devices: list[jax.Device], strategy: Strategy, dtype: str, purpose: Purpose
) -> Parallelism:
    """Ask the planner for the fastest mesh of these devices, which are assumed to form slices of that size.

    Args:
        spec: the architecture.
        devices: all devices of the mesh.
        strategy: the mesh axes that shard each logical axis.
        dtype: of weights and activations.
        purpose: what the model is opened for.

    Raises:
        MissingDependencyError: the planner is not installed.
        UnsupportedError: the model fits in no way.
    """
    planner: Planner = default_registry().service("planner")
    chip = chip_of_device_kind(devices[0].device_kind) or chip_named(STAND_IN)
    topology = topology_of(chip, len(devices), number_of_slices(devices))
    if topology is None:  # of a tpu7x chip that several processes share, one core
        return Parallelism(strategy=strategy)
    found = planner.fastest_mesh(spec, topology, strategy=strategy, dtype=dtype, purpose=purpose)
    assert found is not None  # every mesh was accepted
    return found


def _refuse_idle_axes(spec: ArchitectureSpec, placement: Placement, purpose: Purpose) -> None:
    if placement.mesh is None:
        return
    stages = stages_of(placement)
    if stages > 1 and purpose != "train":
        raise UnsupportedError(
            f"a mesh with {STAGE}={stages} was asked for, but only training passes rows through stages of layers: use "
            "the axes tensor, fsdp, expert or data."
        )
    if stages > 1:
        check_stages(spec, stages)
    sizes = dict(placement.mesh.shape)
    padded, _ = pad_for(spec, placement)
    mixes = any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)
    busy = {axis for logical in (axes.BATCH, axes.SEQUENCE, axes.LAYERS) for axis in placement.axes_of(logical)}
    for path, parameter in padded.parameters.items():
        for mesh_axes in placement.strategy.mesh_axes(parameter.axes, parameter.shape, sizes, path):
            busy.update(mesh_axes)
    if not mixes and placement.strategy == usual_strategy(trains=purpose == "train"):
        busy.discard("expert")  # which would be another name of fsdp
    refuse_idle_axes(spec.model_type, sizes, busy)
