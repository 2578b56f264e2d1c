"""Ring attention (arXiv 2310.01889): attention over a sequence that is sharded over devices. Each device holds its
own queries; keys and values rotate around the ring, so that no device ever holds the whole sequence."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import MASKED, SegmentIds, visibility

BLOCK = 512
"""Keys per block. Only the scores of one block with a device's queries are in memory at a time."""

Keys = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
Running = tuple[jax.Array, jax.Array, jax.Array]


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why ring attention cannot compute this layer, or None."""
    if spec.alibi is not None:
        return "it adds no position biases (ALiBi)"
    if not context.sequence_axes:
        return "no mesh axis shards the sequence"
    if set(context.sequence_axes) & {*context.batch_axes, *context.head_axes}:
        return "one mesh axis shards both the sequence and rows or heads"
    if not context.own_keys or queries != keys:
        return "it attends within a sequence, not to a cache"
    return None


def ring_attention(
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
    """The result of `eager` for layers that `serves` accepts, except that padding queries have other finite values.

    Every device computes with every block of keys, also with those that causality hides from it: the last device
    needs them all, and the others would have to wait for it.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, seq, head_dim], rotated.
        value: [batch, kv_heads, seq, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, seq].
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks.
        segment_ids: [batch, seq] and [batch, seq], see `eager`.
        context: a mesh with `sequence_axes`.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    assert context.mesh is not None
    if context.platform == "cpu":
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    batch, heads, sequence = context.batch_axes or None, context.head_axes or None, context.sequence_axes
    queries = PartitionSpec(batch, sequence, heads, None, None)
    keys, rows = PartitionSpec(batch, heads, sequence, None), PartitionSpec(batch, sequence)
    devices = prod(context.mesh.shape[axis] for axis in sequence)
    of_queries, of_keys = segment_ids if segment_ids is not None else (None, None)
    return jax.shard_map(
        partial(_local, spec=spec, axes=sequence, devices=devices),
        mesh=context.mesh,
        in_specs=(queries, rows, rows, (keys, keys, rows, rows), PartitionSpec(heads)),
        out_specs=queries,
        check_vma=False,
    )(query, query_positions, of_queries, (key, value, key_positions, of_keys), sinks)


def _local(
    query: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    keys: Keys,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    axes: tuple[str, ...],
    devices: int,
) -> jax.Array:
    """One device's queries [batch, seq, kv_heads, q_per_kv, head_dim] with the keys of all devices, its own first."""
    batch, seq, kv, group, dim = query.shape
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv, group * seq, dim).astype(keys[0].dtype)
    shape = (batch, kv, group, seq)
    lowest, nothing = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    running: Running = lowest, nothing, jnp.zeros((*shape, keys[1].shape[-1]), jnp.float32)
    to_next = [(device, (device + 1) % devices) for device in range(devices)]
    attend = jax.checkpoint(partial(_attend, spec=spec))
    for turn in range(devices):
        if turn:
            keys = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), keys)
        for begin in range(0, seq, BLOCK):
            running = attend(running, rows, positions, segments, _block(keys, begin, min(begin + BLOCK, seq)))
    highest, total, mixed = running
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, :, None]
        above = jnp.maximum(highest, sink)
        shrunk = jnp.exp(highest - above)
        total, mixed = total * shrunk + jnp.exp(sink - above), mixed * shrunk[..., None]
    mixed = mixed / total[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).astype(query.dtype)


def _block(keys: Keys, begin: int, end: int) -> Keys:
    key, value, positions, segments = keys
    own_segments = None if segments is None else segments[:, begin:end]
    return key[:, :, begin:end], value[:, :, begin:end], positions[:, begin:end], own_segments


def _attend(
    running: Running,
    rows: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    keys: Keys,
    spec: AttentionSpec,
) -> Running:
    """Update the highest score, the sum of exponentials and the weighted values [batch, kv_heads, q_per_kv, seq]
    with a further block of keys (online softmax, arXiv 1805.02867)."""
    highest, total, mixed = running
    key, value, key_positions, key_segments = keys
    product: Any = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    scores = product(rows, key, (((3,), (3,)), ((0, 1), (0, 1)))).reshape(*highest.shape, -1) * spec.softmax_scale
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    ids = None if segments is None or key_segments is None else (segments, key_segments)
    visible = visibility(positions, key_positions, spec, ids)[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    above = jnp.maximum(highest, scores.max(-1))
    weights, shrunk = jnp.exp(scores - above[..., None]), jnp.exp(highest - above)
    flat = weights.reshape(*rows.shape[:3], -1).astype(value.dtype)
    added = product(flat, value, (((3,), (2,)), ((0, 1), (0, 1)))).reshape(mixed.shape)
    return above, total * shrunk + weights.sum(-1), mixed * shrunk[..., None] + added
