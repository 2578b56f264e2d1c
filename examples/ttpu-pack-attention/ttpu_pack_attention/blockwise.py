"""Softmax attention in blocks of queries and keys, in pure JAX. In: what `ttpu_jax.ops.attention.eager` is given; out:
the same vectors, without ever holding more than one block of scores, forward or backward.

The softmax is summed as the blocks come (arXiv 1805.02867), blocks are recomputed for the gradient (arXiv 2112.05682),
and on one device a block of which no query sees anything is skipped: later keys, keys outside the window, empty slots
of a cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from ttpu_core.errors import RequestError
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import AttentionContext, visibility

BLOCKS, SMALLEST, LARGEST = 8, 16, 512
"""A sequence is cut into so many blocks, of no fewer and no more tokens than these: enough blocks for half of a causal
sequence to be skipped, and none so small that the products in it are."""

MASKED = -1e30  # finite, as in the reference: the difference of two masked scores is a number

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Of the keys seen so far: the largest score and the sum of exponentials [..., queries], the weighted sum of values
[..., queries, value_dim]; float32."""


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
    """Softmax attention; arguments and result are those of `ttpu_jax.ops.attention.eager`.

    A query that sees no key (padding) gives zeros. `attention_config={"block": n}` makes no block larger than n tokens.

    Raises:
        RequestError: another setting, or no positive number of tokens.
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
    cut = jax.tree.map(lambda x: _cut(x, block, padding), (query, query_positions, segments))
    _, mixed = jax.lax.scan(lambda carry, queries: (carry, one(queries, *rest)), None, cut)
    return mixed.swapaxes(0, 1).reshape(query.shape[0], seq + padding, *mixed.shape[3:])[:, :seq]


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why a layer cannot be served, or None; the backend takes the reference instead."""
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
        start = jnp.minimum(begin, keys - block)  # the last block repeats keys of the one before, which are masked

        def part(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, block, axis)

        positions = jnp.where(start + jnp.arange(block) >= begin, part(key_positions, 1), -1)
        pair = None if segments is None or key_segments is None else (segments, part(key_segments, 1))
        visible = visibility(query_positions, positions, spec, pair)

        def add(sums: Sums) -> Sums:
            return _add_block(sums, rows, part(key, 2).astype(dtype), part(value, 2).astype(dtype), visible, spec)

        if context.mesh is not None:  # devices would have to agree on which blocks are empty, an exchange for each
            return add(sums), None
        return jax.lax.cond(visible.any(), add, lambda sums: sums, sums), None

    heads = (batch, kv, group, seq)
    if sinks is None:
        largest, total = jnp.full(heads, MASKED, jnp.float32), jnp.zeros(heads, jnp.float32)
    else:  # a key that has a score and no value
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
    kept = jnp.exp(largest - new_largest)  # what the earlier sums are worth beside the new largest score
    flat = weights.reshape(*rows.shape[:3], -1).astype(value.dtype)
    added = jax.lax.dot_general(flat, value, (((3,), (2,)), batched), preferred_element_type=jnp.float32)
    return new_largest, total * kept + weights.sum(-1), mixed * kept[..., None] + added.reshape(mixed.shape)


def _block_size(tokens: int, limit: int) -> int:
    """Tokens per block: a power of two, or all of them where they are few."""
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


def _cut(x: jax.Array, block: int, padding: int) -> jax.Array:
    """[batch, seq, ...] → [blocks, batch, block, ...]; what is added at the end is cut off again."""
    widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, widths, constant_values=-1 if jnp.issubdtype(x.dtype, jnp.integer) else 0)
    return padded.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1)
