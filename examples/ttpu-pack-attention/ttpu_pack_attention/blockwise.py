"""Softmax attention in blocks of queries and keys, in pure JAX. The result equals `ttpu_jax.ops.attention.eager`,
and only one block of scores is in memory at a time, forward and backward.

The softmax is accumulated over blocks (arXiv 1805.02867), and blocks are recomputed for the gradient (arXiv
2112.05682). On one device, blocks that are masked entirely are skipped: later keys, keys outside the window, empty
cache slots."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from ttpu_core.errors import RequestError
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import AttentionContext, visibility

BLOCKS, SMALLEST, LARGEST = 8, 16, 512
"""Number of blocks of a sequence, and the smallest and largest number of tokens per block. There are enough blocks to
skip half of a causal sequence, and they are large enough for efficient products."""

MASKED = -1e30  # finite, as in the reference: the difference of two masked scores is a number

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Sums over the keys so far, in float32: the largest score and the sum of exponentials [..., queries], and the
weighted sum of values [..., queries, value_dim]."""


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    context: AttentionContext,
) -> jax.Array:
    """Softmax attention; the arguments and the result are those of `ttpu_jax.ops.attention.eager`.

    A query whose keys are all masked (padding) returns zeros. `attention_config={"block": n}` limits blocks to n
    tokens.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, keys]; keys with a negative position are masked.
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks.
        segment_ids: [batch, seq] and [batch, keys] of packed sequences.
        context: devices, platform and options.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.

    Raises:
        RequestError: an unknown setting, or a block size that is not a positive number.
    """
    seq, limit = query.shape[1], _block_limit(context)
    segments = None if segment_ids is None else segment_ids[0]
    key_segments = None if segment_ids is None else segment_ids[1]
    block = _block_size(seq, limit)
    one = jax.checkpoint(partial(_one_block_of_queries, spec=spec, context=context, limit=limit))
    rest = (key, value, key_positions, key_segments, sinks)
    if seq <= block:
        return one((query, query_positions, segments), *rest)
    padding = -seq % block
    blocks = jax.tree.map(lambda x: _in_blocks(x, block, padding), (query, query_positions, segments))
    _, mixed = jax.lax.scan(lambda carry, queries: (carry, one(queries, *rest)), None, blocks)
    return mixed.swapaxes(0, 1).reshape(query.shape[0], seq + padding, *mixed.shape[3:])[:, :seq]


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why a layer cannot be served, or None. The backend uses the reference for layers that cannot be served."""
    return "position biases (ALiBi)" if spec.alibi is not None else None


attend.serves = serves  # type: ignore[attr-defined]


def _one_block_of_queries(
    queries: tuple[jax.Array, jax.Array, jax.Array | None],
    key: jax.Array,
    value: jax.Array,
    key_positions: jax.Array,
    key_segments: jax.Array | None,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    context: AttentionContext,
    limit: int,
) -> jax.Array:
    """Queries [batch, block, kv_heads, q_per_kv, head_dim], their positions and segments [batch, block], against all
    keys in blocks of at most `limit`: [batch, block, kv_heads, q_per_kv, value_dim]."""
    query, query_positions, segments = queries
    batch, seq, kv, group, dim = query.shape
    dtype = jnp.dtype(jnp.float32) if context.platform == "cpu" else key.dtype  # what XLA:CPU multiplies fastest
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv, group * seq, dim).astype(dtype)
    keys = key.shape[2]
    block = _block_size(keys, limit)

    def step(sums: Sums, number: jax.Array) -> tuple[Sums, None]:
        begin = number * block
        start = jnp.minimum(begin, keys - block)  # the last block repeats keys of the previous one; they are masked

        def part(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, block, axis)

        positions = jnp.where(start + jnp.arange(block) >= begin, part(key_positions, 1), -1)
        pair = None if segments is None or key_segments is None else (segments, part(key_segments, 1))
        visible = visibility(query_positions, positions, spec, pair)

        def add(sums: Sums) -> Sums:
            return _add_block(sums, rows, part(key, 2).astype(dtype), part(value, 2).astype(dtype), visible, spec)

        if context.mesh is not None:  # devices would have to agree on empty blocks, at one exchange per block
            return add(sums), None
        return jax.lax.cond(visible.any(), add, lambda sums: sums, sums), None

    heads = (batch, kv, group, seq)
    if sinks is None:
        largest, total = jnp.full(heads, MASKED, jnp.float32), jnp.zeros(heads, jnp.float32)
    else:  # a sink is a key with a score and no value
        largest = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], heads)
        total = jnp.ones(heads, jnp.float32)
    sums = (largest, total, jnp.zeros((*heads, value.shape[-1]), jnp.float32))
    (_, total, mixed), _ = jax.lax.scan(jax.checkpoint(step), sums, jnp.arange(-(-keys // block)))
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).astype(query.dtype)


def _add_block(
    sums: Sums, rows: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, spec: AttentionSpec
) -> Sums:
    """The sums after one more block: rows [batch, kv_heads, q_per_kv * queries, head_dim], key and value [batch,
    kv_heads, keys, dim], visible [batch, queries, keys]."""
    largest, total, mixed = sums
    batched = ((0, 1), (0, 1))
    scores = jax.lax.dot_general(rows, key, (((3,), (3,)), batched), preferred_element_type=jnp.float32)
    scores = scores.reshape(*largest.shape, -1) * spec.softmax_scale
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    seen = visible[:, None, None]
    scores = jnp.where(seen, scores, MASKED)
    new_largest = jnp.maximum(largest, scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - new_largest[..., None]), 0.0)
    kept = jnp.exp(largest - new_largest)  # rescales the earlier sums to the new largest score
    flat = weights.reshape(*rows.shape[:3], -1).astype(value.dtype)
    added = jax.lax.dot_general(flat, value, (((3,), (2,)), batched), preferred_element_type=jnp.float32)
    return new_largest, total * kept + weights.sum(-1), mixed * kept[..., None] + added.reshape(mixed.shape)


def _block_size(tokens: int, limit: int) -> int:
    """Tokens per block: a power of two, or all tokens of a short sequence."""
    wanted = 1 << (max(1, -(-tokens // BLOCKS)) - 1).bit_length()
    return min(tokens, limit, max(SMALLEST, wanted))


def _block_limit(context: AttentionContext) -> int:
    options = dict(context.options)
    limit = options.pop("block", LARGEST)
    if options or not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise RequestError(
            f"attention_config has {dict(context.options)}, but attention in blocks has one setting, 'block', the most "
            "tokens per block, 1 or more: correct it or leave it out."
        )
    return limit


def _in_blocks(x: jax.Array, block: int, padding: int) -> jax.Array:
    """[batch, seq, ...] → [blocks, batch, block, ...]. The caller removes the padding at the end."""
    widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, widths, constant_values=-1 if jnp.issubdtype(x.dtype, jnp.integer) else 0)
    return padded.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1)
