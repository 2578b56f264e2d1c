"""Attention of one query a row to a contiguous cache, as a Pallas kernel that reads keys and values once, and blocks of
them that a row does not see not at all."""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.blocks import LANES, SUBLANES
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import SegmentIds, visibility

LARGEST_TILE = 2**21
"""Of the keys of 128 slots of a row in a cache that the kernel writes; it holds six of these or of values."""
LARGEST_WHOLE = 2**21
"""Of the keys of a cache that may be one block, where its slots are not a multiple of 128."""


def unserved_context(context: AttentionContext) -> str | None:
    """Why no kernel for decode steps runs with these devices and this cache, or None."""
    if context.platform == "gpu":
        return "it is a kernel for TPUs"
    if context.of_stack:
        return "the keys of one of several stacked layers would be copied for it"
    if context.sequence_axes:
        return "it needs the whole cache on one device"
    return None


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why the kernel cannot compute this layer, or None."""
    if why := unserved_context(context):
        return why
    if context.own_keys:
        return "it attends to a cache, not within a sequence"
    if spec.alibi is not None:
        return "it adds no position biases (ALiBi)"
    odd = next((size for size in (spec.head_dim, spec.value_dim) if size % SUBLANES), None)
    if odd is not None and context.platform == "tpu":
        return f"its heads have {odd} features, not a multiple of {SUBLANES}"
    if queries != 1:
        return "it takes one query of each row"
    if keys % LANES and keys * spec.num_kv_heads * max(spec.head_dim, spec.value_dim) * 4 > LARGEST_WHOLE:
        return f"{keys:,} slots are not a multiple of {LANES}"
    return None


def writes(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int, item: int) -> bool:
    """Whether the kernel can also write a step's tokens into the cache of a layer: where it serves that, copies of 128
    slots are whole tiles of it, and VMEM has room for such a tile of all heads.

    Args:
        spec: the layer's attention.
        context: devices and platform.
        queries: of each row.
        keys: slots of each row.
        item: bytes of a number in the cache.
    """
    if keys % LANES or item < 2 or serves(spec, context, queries, keys) is not None:
        return False
    ways = 1 if context.mesh is None else prod(context.mesh.shape[axis] for axis in context.head_axes)
    slots_last = [size for size in (spec.head_dim, spec.value_dim) if size % LANES]
    return spec.num_kv_heads // ways * LANES * max(slots_last, default=0) * item <= LARGEST_TILE


def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    segment_ids: SegmentIds | None = None,
    context: AttentionContext,
) -> jax.Array:
    """The result of `eager` for layers that `serves` accepts, except that a query that sees nothing gets zeros.

    Args:
        query: [batch, 1, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, value_dim].
        query_positions: [batch, 1].
        key_positions: [batch, keys]; keys with a negative position are masked.
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks.
        segment_ids: [batch, 1] and [batch, keys], see `eager`.
        context: devices and platform. On a CPU the kernel is interpreted.

    Returns:
        [batch, 1, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    visible = visibility(query_positions, key_positions, spec, segment_ids)
    return _run(query, key, value, visible, sinks, None, spec, context)[0]


def write_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pairs: jax.Array,
    slot: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    context: AttentionContext,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`decode_attention` for layers that `writes` accepts, whose cache gets a token of each row before.

    Args:
        query: [batch, 1, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated; donated, without the new token.
        value: [batch, kv_heads, keys, value_dim], donated, without the new token.
        pairs: [batch, 1, kv_heads, 2, width], the key and the value of each row's new token, which its query sees; the
            narrower of both is padded at its end.
        slot: int32 scalar, where they go in all rows.
        query_positions: [batch, 1].
        key_positions: [batch, keys], with the new token's.
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        context: devices and platform. On a CPU the kernel is interpreted.

    Returns:
        [batch, 1, kv_heads, q_per_kv, value_dim] in the query's dtype; the keys and the values with the new token.
    """
    visible = visibility(query_positions, key_positions, spec)
    # Queries, keys and values mostly come from one product in this order: XLA does not move them for this.
    rows = jnp.concatenate([_widened(query, pairs.shape[-1]), pairs.astype(query.dtype)], axis=3)
    return _run(rows, key, value, visible, sinks, slot, spec, context)


def paired(key: jax.Array, value: jax.Array) -> jax.Array:
    """key [batch, kv_heads, seq, head_dim] and value [batch, kv_heads, seq, value_dim] as [batch, seq, kv_heads, 2,
    width], where the narrower is padded with zeros."""
    width = max(key.shape[-1], value.shape[-1])
    return jnp.stack([_widened(key, width), _widened(value, width)], axis=3).swapaxes(1, 2)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """x [..., features] with zeros up to [..., width]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _run(
    rows: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    slot: jax.Array | None,
    spec: AttentionSpec,
    context: AttentionContext,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel on each device, for rows [batch, 1, kv_heads, q_per_kv, head_dim] or, where a slot is written,
    [batch, 1, kv_heads, q_per_kv + 2, width], and visible bool [batch, 1, keys]."""
    from ttpu_jax.ops.attention.decode_kernel import attended_rows  # Pallas takes a tenth of a second to import

    local = partial(attended_rows, spec=spec, interpret=context.platform == "cpu")
    if context.mesh is not None:
        batch, heads = PartitionSpec(context.batch_axes or None), PartitionSpec(context.head_axes or None)
        of_heads = PartitionSpec(context.batch_axes or None, context.head_axes or None)
        specs = (of_heads, of_heads, of_heads, batch, heads, PartitionSpec())
        local = jax.shard_map(
            local, mesh=context.mesh, in_specs=specs, out_specs=(of_heads, of_heads, of_heads), check_vma=False
        )
    mixed, key, value = local(rows[:, 0], key, value, visible, sinks, slot)
    return mixed[:, None], key, value
