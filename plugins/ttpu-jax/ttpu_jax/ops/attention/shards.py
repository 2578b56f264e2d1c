"""Runs a single-device attention kernel over a mesh that shards batch, heads and possibly the sequence. Segments
express every mask that depends on the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ttpu_core.sharding.strategy import STAGE
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import SegmentIds

PADDING = -(2**31)  # the segment of padding tokens, invisible to all other segments

LocalAttention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None],
    jax.Array,
]


def over_mesh(
    local: LocalAttention,
    context: AttentionContext,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: SegmentIds,
    sinks: jax.Array | None,
) -> jax.Array:
    """Run `local(query, key, value, query segments, key segments, sinks)` on each device's rows, heads and part of the
    sequence. The compiler cannot shard a kernel and would gather its operands.

    The gradient of each device stays its own. JAX's gradient of a `shard_map` would add up the gradients of devices
    that compute the same (a mesh axis that shards neither batch nor heads), because a kernel does not declare that
    they do.

    Args:
        local: attention of one device.
        context: the mesh, and the axes that shard batch, heads and sequence.
        query: [batch, seq, kv_heads, q_per_kv, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        segments: [batch, seq] and [batch, keys], see `segments_of`.
        sinks: [kv_heads, q_per_kv], or None.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim].
    """
    if context.mesh is None:
        return local(query, key, value, *segments, sinks)
    batch, heads, sequence = context.batch_axes or None, context.head_axes or None, context.sequence_axes or None
    queries = PartitionSpec(batch, sequence, heads, None, None)
    keys, rows, per_head = PartitionSpec(batch, heads, sequence), PartitionSpec(batch, sequence), PartitionSpec(heads)
    # One per device, along an additional leading axis. Stages compute as one of them does, or are an axis of vmap.
    own = PartitionSpec(tuple(axis for axis in context.mesh.axis_names if axis != STAGE))
    differentiable, fixed = (queries, keys, keys, per_head), (rows, rows)
    on_devices = partial(jax.shard_map, mesh=context.mesh, check_vma=False)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array | None, *ids: jax.Array) -> jax.Array:
        return local(q, k, v, ids[0], ids[1], s)

    @jax.custom_vjp
    def run(*arrays: Any) -> Any:
        return on_devices(attention, in_specs=(*differentiable, *fixed), out_specs=queries)(*arrays)

    def forward(*arrays: Any) -> Any:
        def one(q: Any, k: Any, v: Any, s: Any, *ids: Any) -> Any:
            mixed, gradients_of = jax.vjp(lambda *arrays: attention(*arrays, *ids), q, k, v, s)
            return mixed, jax.tree.map(lambda x: x[None], gradients_of)

        return on_devices(one, in_specs=(*differentiable, *fixed), out_specs=(queries, own))(*arrays)

    def backward(gradients_of: Any, gradient: Any) -> Any:
        def one(gradients_of: Any, gradient: Any) -> Any:
            q, k, v, s = jax.tree.map(lambda x: x[0], gradients_of)(gradient)
            return q, k, v, s if s is None else jax.lax.psum(s, (*context.batch_axes, *context.sequence_axes))

        gradients = on_devices(one, in_specs=(own, queries), out_specs=differentiable)(gradients_of, gradient)
        return (*gradients, None, None)

    run.defvjp(forward, backward)
    result: jax.Array = run(query, key, value, sinks, *segments)
    return result


def segments_of(
    spec: AttentionSpec,
    query_positions: jax.Array,
    key_positions: jax.Array,
    segment_ids: SegmentIds | None,
) -> SegmentIds:
    """Segments [batch, seq] and [batch, keys] for a kernel: tokens of different segments do not attend to each
    other. Segments separate padding, chunks and packed sequences.

    A chunk is a span of positions, not of slots, so that left padding does not shift it. Chunk numbers are taken
    modulo one more than the number of chunks in a row, which leaves room for the sequence's own number.

    Args:
        spec: the chunk size.
        query_positions: [batch, seq].
        key_positions: [batch, keys].
        segment_ids: [batch, seq] and [batch, keys] of packed sequences, or None.
    """
    keys = key_positions.shape[1]

    def numbered(positions: jax.Array, ids: jax.Array | None) -> jax.Array:
        segments = jnp.zeros_like(positions) if ids is None else ids.astype(positions.dtype)
        if spec.chunk is not None:
            most = keys // spec.chunk + 2
            segments = segments * most + positions // spec.chunk % most
        return jnp.where(positions < 0, PADDING, segments)

    of_queries, of_keys = segment_ids if segment_ids is not None else (None, None)
    return numbered(query_positions, of_queries), numbered(key_positions, of_keys)


def not_own_keys(context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why a TPU kernel for whole sequences cannot be used for reasons other than the layer itself, or None."""
    if context.platform == "gpu":
        return "it is a kernel for TPUs"
    if not context.own_keys:
        return "it attends within a sequence, not to a cache"
    if queries != keys or queries == 1:
        return "the queries are not all of the sequence"
    return None


def pad_sequence(x: jax.Array, length: int, axis: int, fill: int = 0) -> jax.Array:
    """Append `fill` to `x`: [...] along `axis` up to `length`. The result is [...] with that length along `axis`."""
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
