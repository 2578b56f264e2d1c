"""Attention of one query a row to a contiguous cache, as a Pallas kernel that reads keys and values once, and blocks of
them that a row does not see not at all."""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.blocks import LANES
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import SegmentIds, visibility

SUBLANES = 16
"""Rows of a tile of bfloat16."""
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
    from ttpu_jax.ops.attention.decode_kernel import attended_rows  # Pallas takes a tenth of a second to import

    visible = visibility(query_positions, key_positions, spec, segment_ids)
    local = partial(attended_rows, spec=spec, interpret=context.platform == "cpu")
    rows = query[:, 0]
    if context.mesh is None:
        return local(rows, key, value, visible, sinks)[:, None]
    batch, heads = context.batch_axes or None, context.head_axes or None
    of_heads = PartitionSpec(batch, heads)
    specs = (of_heads, of_heads, of_heads, PartitionSpec(batch), PartitionSpec(heads))
    run = jax.shard_map(local, mesh=context.mesh, in_specs=specs, out_specs=of_heads, check_vma=False)
    mixed: jax.Array = run(rows, key, value, visible, sinks)
    return mixed[:, None]
