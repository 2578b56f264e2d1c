"""Reference attention in plain JAX. Every other implementation has its signature and is compared with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import alibi
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.platform import multiplies_bfloat16

CAUSAL_BLOCKS, SMALLEST_BLOCK = 4, 128  # number of query blocks, and the smallest useful block of queries
CAUSAL_BLOCKS_ON_CPU, SMALLEST_BLOCK_ON_CPU = 8, 64
FEW_QUERIES = 4
"""The most queries of a KV head that a CPU multiplies by float32 keys one after the other. XLA:CPU's product of 2 to 4
queries reads a large cache at a fifth to a half of the rate that a product of one query reaches. 12 layers, 8 rows of
512 tokens, 3 queries: a decode step takes 32 instead of 44 ms. Attention alone of 8 rows of 1,024 tokens, 4 queries, 4
KV heads: 19 instead of 30 ms. Of a block of pages it is five times as fast."""
FEW_ROWS = 32
"""The most queries of a KV head for which a CPU sums values `VALUES_AT_ONCE`, in bfloat16 where they are bfloat16."""
VALUES_AT_ONCE = 128
"""XLA:CPU sums more values at once at a half to four fifths of the rate. 12 layers, 8 rows of 2,176 tokens, 3 queries
of each of 4 KV heads: 10 instead of 25 ms in bfloat16, and with the scores 37 instead of 46 ms in float32."""
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
        context: devices and platform. On a CPU products run in float32, unless it has instructions for bfloat16 and
            query, key and value are all bfloat16.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    seq, on_cpu = query.shape[1], context.platform == "cpu"
    number, smallest = (CAUSAL_BLOCKS_ON_CPU, SMALLEST_BLOCK_ON_CPU) if on_cpu else (CAUSAL_BLOCKS, SMALLEST_BLOCK)
    block = max(smallest, -(-seq // number))
    if not spec.causal or key.shape[2] != seq or seq <= block:
        return _attend(query, key, value, query_positions, key_positions, spec, sinks, segment_ids, on_cpu)
    # Causal self-attention: a block of queries needs only the keys up to its own end, five eighths of all scores.
    blocks = []
    for begin in range(0, seq, block):
        end = min(begin + block, seq)
        queries = query[:, begin:end], query_positions[:, begin:end]
        keys = key[:, :, :end], value[:, :, :end], key_positions[:, :end]
        segments = None if segment_ids is None else (segment_ids[0][:, begin:end], segment_ids[1][:, :end])
        blocks.append(_attend(queries[0], keys[0], keys[1], queries[1], keys[2], spec, sinks, segments, on_cpu))
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
    on_cpu: bool,
) -> jax.Array:
    """`eager` without blocks: all scores at once."""
    batch, seq, kv, group, dim = query.shape
    few = on_cpu and group * seq <= FEW_ROWS
    narrow = on_cpu and query.dtype == key.dtype == value.dtype == jnp.bfloat16 and multiplies_bfloat16()
    if on_cpu and not narrow:
        key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    # Queries of one KV head become the rows of one matrix: XLA:TPU and XLA:CPU run batched products with leading batch
    # dimensions without copying the cache.
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv, group * seq, dim).astype(key.dtype)
    scores = query_scores(rows, key, FEW_QUERIES if few else 0).reshape(batch, kv, group, seq, -1)
    scores = alibi.scaled(scores, spec, query_positions, key_positions, alibi.slopes(spec))
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    visible = visibility(query_positions, key_positions, spec, segment_ids)[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    sink = None if sinks is None else sinks.astype(jnp.float32)[None, :, :, None, None]
    # A CPU divides the sums of values, of which there are fewer than probabilities.
    shares, total = _exponentials(scores, sink) if on_cpu else (_softmax(scores, sink), None)
    shares = shares.reshape(batch, kv, group * seq, -1)
    mixed = _mixed_by_few(shares, value) if few else _mixed(shares.astype(value.dtype), value)
    mixed = mixed.reshape(batch, kv, group, seq, -1)
    mixed = mixed if total is None else mixed / total
    return mixed.transpose(0, 3, 1, 2, 4).astype(query.dtype)


def _softmax(scores: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Probabilities of scores [batch, kv_heads, q_per_kv, seq, keys]; sink [1, kv_heads, q_per_kv, 1, 1]."""
    if sink is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def _exponentials(scores: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`_softmax` as numerators and their sum [batch, kv_heads, q_per_kv, seq, 1]."""
    most = scores.max(axis=-1, keepdims=True)
    most = jax.lax.stop_gradient(most if sink is None else jnp.maximum(most, sink))
    shares = jnp.exp(scores - most)
    total = shares.sum(axis=-1, keepdims=True)
    return shares, total if sink is None else total + jnp.exp(sink - most)


def query_scores(query: jax.Array, key: jax.Array, few: int = 0) -> jax.Array:
    """The products of queries and keys: float32 [batch, heads, queries, keys].

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, heads, keys, dim], in the query's dtype.
        few: up to so many float32 queries are multiplied one after the other, and bfloat16 ones at once, a single one
            twice, because XLA:CPU would multiply it by a naive loop. 0 leaves them as they are.
    """
    dims, number = (((3,), (3,)), ((0, 1), (0, 1))), query.shape[2]
    if few and query.dtype == jnp.bfloat16:
        several = jnp.repeat(query, 2, axis=2) if number == 1 else query
        return jax.lax.dot_general(several, key, dims, preferred_element_type=jnp.float32)[:, :, :number]
    if number > few:
        return jax.lax.dot_general(query, key, dims, preferred_element_type=jnp.float32)
    queries = jnp.split(query, number, axis=2)
    products = [jax.lax.dot_general(one, key, dims, preferred_element_type=jnp.float32) for one in queries]
    return jnp.concatenate(products, axis=2)


def _mixed(weights: jax.Array, value: jax.Array) -> jax.Array:
    """The sums of values [batch, heads, keys, dim] by weights [batch, heads, queries, keys] in their dtype: float32
    [batch, heads, queries, dim]."""
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(weights, value, dims, preferred_element_type=jnp.float32)


def _mixed_by_few(weights: jax.Array, value: jax.Array) -> jax.Array:
    """`_mixed` on a CPU, for few queries, float32 weights and values in bfloat16 or float32. For bfloat16 a weight is
    the sum of two rounded ones, each in a row of the product."""
    batch, heads, queries, keys = weights.shape
    rounded = value.dtype == jnp.bfloat16
    if keys % VALUES_AT_ONCE or (queries == 1 and not rounded):
        return _mixed(weights, value.astype(jnp.float32))
    rows = weights
    if rounded:
        high = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        rows = jnp.concatenate([high, rows - high], axis=2).astype(value.dtype)
    rows = rows.reshape(batch, heads, -1, keys // VALUES_AT_ONCE, VALUES_AT_ONCE)
    blocks = value.reshape(batch, heads, -1, VALUES_AT_ONCE, value.shape[-1])
    dims = (((4,), (3,)), ((0, 1, 3), (0, 1, 2)))
    sums = jax.lax.dot_general(rows, blocks, dims, preferred_element_type=jnp.float32).sum(2)
    return sums[:, :, :queries] + sums[:, :, queries:] if rounded else sums


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
