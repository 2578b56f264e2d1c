"""Pipeline parallelism: the layers are divided over the devices along the mesh axis `stage`, and the rows of a batch
pass through these stages in microbatches, one stage further at each tick.

All stages run the same program (`jax.vmap` over an axis that the mesh shards), so that the compiler shards what a stage
computes over the other mesh axes as it does without stages. A stage that waits computes with values that nothing reads.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.strategy import STAGE
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_core.spec.parameters import GROUPS
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_jax.model.causal_model import DecoderModel, Params
    from ttpu_jax.model.modules import Step


def stages_of(placement: Placement) -> int:
    """The number of stages of a mesh; 1 without the axis."""
    return 1 if placement.mesh is None else int(placement.mesh.shape.get(STAGE, 1))


def check_stages(spec: ArchitectureSpec, stages: int) -> None:
    """Check that stages can have equal layers.

    Raises:
        UnsupportedError: the layers are not one repeated unit, stages do not divide its copies, or layers read more
            than the stream.
    """
    groups = spec.groups()
    beside = "layers that read keys of others" if spec.kv_sources else "an embedding that later layers read too"
    if spec.kv_sources or spec.embedding.custom or any(layer.block.reads_embedding for layer in spec.layers):
        raise UnsupportedError(
            f"{STAGE}={stages} was asked for, but a {spec.model_type} model has {beside}, which would have to cross "
            "stages: use a mesh of fsdp, tensor or expert."
        )
    if len(groups) > 1:
        found = " + ".join(f"{one.repeats} x {len(one.unit)}" for one in groups)
        raise UnsupportedError(
            f"{STAGE}={stages} was asked for, but stages must have equal layers and this {spec.model_type} model has "
            f"the groups {found}: use a mesh of fsdp, tensor or expert."
        )
    repeats = groups[0].repeats
    if repeats % stages:
        possible = ", ".join(str(count) for count in range(2, repeats + 1) if repeats % count == 0) or "none"
        raise UnsupportedError(
            f"{STAGE}={stages} was asked for, but stages must have equal layers and this {spec.model_type} model has "
            f"{repeats} repeated units of {len(groups[0].unit)} layers: the stages that divide them are {possible}."
        )


def of_stages(params: Params, stages: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stacked parameters with an axis for stages, [stages, layers / stages, ...], and all others."""
    stacked = {path: value for path, value in params.items() if path.startswith(GROUPS)}
    by_stage = jax.tree.map(lambda array: array.reshape(stages, -1, *array.shape[1:]), stacked)
    return by_stage, {path: value for path, value in params.items() if path not in stacked}


def run_stages(model: DecoderModel, by_stage: Any, others: Params, x: Any, step: Step) -> tuple[Any, Any]:
    """Run every stage once, each on its own microbatch.

    Args:
        model: of the architecture.
        by_stage: path → [stages, layers / stages, ...].
        others: the parameters outside of layers.
        x: [stages, rows, seq, hidden], the streams that arrive.
        step: of each stage's microbatch; its arrays have a leading axis for stages.

    Returns:
        The streams behind the stages, in the shape of x, and the loads of experts [stages, layers / stages, 2,
            experts], a list that is empty if they are not asked for.
    """

    def run(arrays: Any, x: jax.Array, step: Step) -> tuple[jax.Array, Any]:
        return model.module({**others, **arrays}).part(x, step)

    found: tuple[Any, Any] = jax.vmap(run, spmd_axis_name=STAGE)(by_stage, x, step)
    return found


def in_microbatches(array: jax.Array, count: int, placement: Placement) -> jax.Array:
    """`array` [batch, ...] as [microbatches, rows, ...], every device keeping its own rows."""
    parts = array.reshape(len(array) // count, count, *array.shape[1:]).swapaxes(0, 1)
    return placement.constrain(parts, None, axes.BATCH, *(None for _ in array.shape[1:]))


def pipelined(
    model: DecoderModel,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None = None,
    *,
    routing: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`Decoder.packed` by GPipe (arXiv 1811.06965): every microbatch passes all stages, and the backward pass, which is
    the gradient of this function, begins after the last one.

    Args:
        model: of the architecture, with the number of microbatches; fewer are used where rows do not suffice.
        params: stacked path → array.
        tokens: [batch, seq].
        positions: [batch, seq], from 0 in each sequence; negative for padding.
        segments: [batch, seq], the sequence of each token in its row; None: each row holds one.
        routing: return the loads of experts too.

    Returns:
        The residual stream after the final norm [batch, seq, hidden], and the loads of experts, float32 [layers, 2,
            experts]; None if not asked for or without experts.
    """
    placement = model.runtime.placement
    stages, decoder = stages_of(placement), model.module(params)
    x, step = decoder.embedded(tokens, positions, segments, routing=routing)
    shards = 1 if placement.mesh is None else _product(placement, placement.mesh_axes(axes.BATCH, len(tokens)))
    count = gcd(model.microbatches or 1, len(tokens) // shards)
    split = jax.tree.map(lambda array: in_microbatches(array, count, placement), (x, step))
    streams, steps = split
    by_stage, others = of_stages(params, stages)
    places = jnp.arange(stages)

    def tick(arriving: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """The streams that arrive at the stages [stages, rows, seq, hidden]."""
        microbatch = number - places
        own = jnp.clip(microbatch, 0, count - 1)
        arriving = jnp.where(_first(arriving, places), streams[own[0]], arriving)
        leaving, loads = run_stages(model, by_stage, others, arriving, jax.tree.map(lambda array: array[own], steps))
        running = (microbatch >= 0) & (microbatch < count)
        loads = jax.tree.map(lambda load: jnp.where(running[:, None, None, None], load, 0), loads)
        return jnp.roll(leaving, 1, axis=0), (leaving[-1], loads)

    nothing = jnp.zeros((stages, *streams.shape[1:]), streams.dtype)
    _, (finished, loads) = jax.lax.scan(tick, nothing, jnp.arange(count + stages - 1))
    whole = finished[stages - 1 :].swapaxes(0, 1).reshape(x.shape)
    summed = [load.sum(0).reshape(-1, *load.shape[3:]) for load in jax.tree.leaves(loads)]
    return decoder.finished(whole), jnp.concatenate(summed) if summed else None


def _first(stream: jax.Array, places: jax.Array) -> jax.Array:
    return (places == 0).reshape(-1, *(1,) * (stream.ndim - 1))


def _product(placement: Placement, mesh_axes: tuple[str, ...]) -> int:
    count = 1
    for axis in mesh_axes:
        count *= placement.mesh.shape[axis] if placement.mesh is not None else 1
    return count
