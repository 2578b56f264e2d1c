"""Reference attention in plain JAX. Every other implementation has its signature and is compared with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import alibi
from ttpu_jax.ops.attention.context import AttentionContext

CAUSAL_BLOCKS, SMALLEST_BLOCK = 4, 128  # number of query blocks, and the smallest useful block of queries
FEW_QUERIES = 3
"""The most queries of a KV head that a CPU multiplies by the keys one after the other. XLA:CPU's product of 2 or 3
queries reads a large cache at a fifth to a half of the rate that a product of one query reaches; a product of 4 or more
is as fast as so many of one. 12 layers, 8 rows of 512 tokens, 3 queries: a decode step takes 32 instead of 44 ms."""
MASKED = -1e30  # finite: a row whose keys are all masked (a padding query) has a finite result

SegmentIds = tuple[jax.Array, jax.Array]
DEFAULT_CONTEXT = AttentionContext()


def eager(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    segment_ids: SegmentIds | None = None,
    context: AttentionContext = DEFAULT_CONTEXT,
) -> jax.Array:
    """Softmax attention with all scores in memory.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, keys]; keys with a negative position are masked.
        spec: scale, softcap, window, chunk, causality, ALiBi.
        sinks: [kv_heads, q_per_kv] logits of attention sinks: each takes a share of the probability and has no
            value.
        segment_ids: [batch, seq] and [batch, keys] segments of sequences packed into one row. Each sequence is
            contiguous, its positions start at its own beginning, and a query attends to its own segment only.
        context: devices and platform; on a CPU the products run in float32, as XLA:CPU needs it.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    if context.platform == "cpu":
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    seq = query.shape[1]
    block = max(SMALLEST_BLOCK, -(-seq // CAUSAL_BLOCKS))
    if not spec.causal or key.shape[2] != seq or seq <= block:
        few = FEW_QUERIES if context.platform == "cpu" else 0
        return _attend(query, key, value, query_positions, key_positions, spec, sinks, segment_ids, few)
    # Causal self-attention: a block of queries needs only the keys up to its own end, five eighths of all scores.
    blocks = []
    for begin in range(0, seq, block):
        end = min(begin + block, seq)
        queries = query[:, begin:end], query_positions[:, begin:end]
        keys = key[:, :, :end], value[:, :, :end], key_positions[:, :end]
        segments = None if segment_ids is None else (segment_ids[0][:, begin:end], segment_ids[1][:, :end])
        blocks.append(_attend(queries[0], keys[0], keys[1], queries[1], keys[2], spec, sinks, segments))
    return jnp.concatenate(blocks, axis=1)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    segment_ids: SegmentIds | None,
    few: int = 0,
) -> jax.Array:
    """`eager` without blocks: all scores at once. few: see `query_scores`."""
    batch, seq, kv, group, dim = query.shape
    # Queries of one KV head become the rows of one matrix: XLA:TPU and XLA:CPU run batched products with leading batch
    # dimensions without copying the cache.
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv, group * seq, dim).astype(key.dtype)
    scores = query_scores(rows, key, few).reshape(batch, kv, group, seq, -1)
    scores = alibi.scaled(scores, spec, query_positions, key_positions, alibi.slopes(spec))
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    visible = visibility(query_positions, key_positions, spec, segment_ids)[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None, None], (batch, kv, group, seq, 1))
        probabilities = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    else:
        probabilities = jax.nn.softmax(scores, axis=-1)
    probabilities = probabilities.reshape(batch, kv, group * seq, -1).astype(value.dtype)
    mixed = jax.lax.dot_general(
        probabilities, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    mixed = mixed.reshape(batch, kv, group, seq, -1).transpose(0, 3, 1, 2, 4)
    return mixed.astype(query.dtype)


def query_scores(query: jax.Array, key: jax.Array, few: int = 0) -> jax.Array:
    """The products of queries and keys: float32 [batch, heads, queries, keys].

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, heads, keys, dim], in the query's dtype.
        few: up to so many queries are multiplied one after the other.
    """
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    if query.shape[2] > few:
        return jax.lax.dot_general(query, key, dims, preferred_element_type=jnp.float32)
    queries = jnp.split(query, query.shape[2], axis=2)
    products = [jax.lax.dot_general(one, key, dims, preferred_element_type=jnp.float32) for one in queries]
    return jnp.concatenate(products, axis=2)


def visibility(
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    segment_ids: SegmentIds | None = None,
) -> jax.Array:
    """Mask of the keys that each query attends to: bool [batch, seq, keys]. Window and chunk count positions, not
    cache slots.

    Args:
        query_positions: [batch, seq].
        key_positions: [batch, keys]; keys with a negative position are masked.
        spec: causality, window, chunk.
        segment_ids: [batch, seq] and [batch, keys], see `eager`.
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    visible = key >= 0
    if spec.causal:
        visible = visible & (key <= query)
    if spec.window is not None:
        visible = visible & (query - key < spec.window)
        if not spec.causal:
            visible = visible & (key - query < spec.window)
    if spec.chunk is not None:
        visible = visible & (query // spec.chunk == key // spec.chunk)
    if segment_ids is not None:
        visible = visible & (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])
    return visible
