"""Paged attention in plain JAX: what runs where no kernel serves, and what kernels are held against. In: the queries of
a flat batch and pages; out: one vector per query head. Its cost follows the contexts in the batch, not the tables'
width, and it never holds more than one block of scores."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import page_size_of, read

TOGETHER = 16
"""Queries of a sequence that are computed at once for all sequences: a decode step, also with drafts to verify."""
QUERY_BLOCK = 128
KEY_BLOCK = 64  # tokens of pages that are read at once


def reference(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    platform: str = "cpu",
) -> jax.Array:
    """query [tokens, kv_heads, q_per_kv, head_dim]: [tokens, kv_heads, q_per_kv, value_dim] in its type."""
    mixed = _few_queries(query, kv, batch, spec, sinks, batch.max_queries, platform)
    return mixed.astype(query.dtype)


def _few_queries(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    block: int,
    platform: str,
) -> jax.Array:
    """Sequences of `block` queries at most."""
    tokens, sequences = query.shape[0], batch.kv_lens.shape[0]
    starts = batch.query_starts[:-1]
    places = jnp.minimum(starts[:, None] + jnp.arange(block), tokens - 1)
    counts = batch.query_starts[1:] - starts
    there = jnp.arange(block) < counts[:, None]
    positions = jnp.where(there, (batch.kv_lens - counts)[:, None] + jnp.arange(block), -1)
    mixed = _attend(query[places], positions, batch.tables[kv.group], kv, spec, sinks, platform)
    rows = jnp.clip(batch.rows, 0, sequences - 1)
    return mixed[rows, jnp.clip(jnp.arange(tokens) - starts[rows], 0, block - 1)]


def _attend(
    query: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    kv: PagedKV,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    platform: str,
) -> jax.Array:
    """query [rows, queries, kv_heads, q_per_kv, head_dim] of positions [rows, queries], negative for none, each row
    over the pages in its row of the table: [rows, queries, kv_heads, q_per_kv, value_dim] in float32, zeros where
    there is no query."""
    rows, queries, heads, group, dim = query.shape
    size = page_size_of(kv)
    together = max(1, KEY_BLOCK // size)
    block, width = together * size, table.shape[1]
    table = jnp.pad(table, ((0, 0), (0, -width % together)))
    compute = jnp.float32 if platform == "cpu" else query.dtype
    turned = query.transpose(0, 2, 3, 1, 4).reshape(rows, heads, group * queries, dim).astype(compute)
    oldest = _oldest_visible(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions).min(), spec)
    first = jnp.minimum(jnp.maximum(oldest, 0) // block, positions.max() // block + 1)

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, mixed = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * together, together, 1)
        key, value = read(kv, pages, spec, compute)
        of_keys = index * block + jnp.arange(block)
        visible = _visible(positions[:, :, None], of_keys, spec)
        # Pages behind a window belong to others: what lies there may be anything, and 0 * NaN is NaN.
        value = jnp.where(visible.any(1)[:, None, :, None], value, 0)
        scores = jax.lax.dot_general(turned, key, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        scores = scores.reshape(rows, heads, group, queries, block) * spec.softmax_scale
        if spec.logit_softcap is not None:
            scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
        shown = visible[:, None, None]
        scores = jnp.where(shown, scores, MASKED)
        now = jnp.maximum(highest, scores.max(-1))
        weights = jnp.where(shown, jnp.exp(scores - now[..., None]), 0)
        keep = jnp.exp(highest - now)
        flat = weights.reshape(rows, heads, group * queries, block).astype(compute)
        more = jax.lax.dot_general(flat, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        mixed = mixed * keep[..., None] + more.reshape(rows, heads, group, queries, -1)
        return now, total * keep + weights.sum(-1), mixed

    zeros = jnp.zeros((rows, heads, group, queries), jnp.float32)
    start = zeros + MASKED, zeros
    if sinks is not None:
        start = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], zeros.shape), zeros + 1
    mixed = jnp.zeros((*zeros.shape, spec.value_dim), jnp.float32)
    _, total, mixed = jax.lax.fori_loop(first, positions.max() // block + 1, step, (*start, mixed))
    mixed = mixed / jnp.where(total == 0, 1, total)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4)


def _oldest_visible(position: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The first position that a query sees, where that is not before the sequence's start."""
    oldest = jnp.zeros_like(position)
    if spec.window is not None:
        oldest = jnp.maximum(oldest, position - spec.window + 1)
    if spec.chunk is not None:
        oldest = jnp.maximum(oldest, position // spec.chunk * spec.chunk)
    return oldest


def _visible(query: jax.Array, key: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Which positions a query sees; none where its own is negative."""
    visible = (key <= query) & (query >= 0)
    if spec.window is not None:
        visible = visible & (query - key < spec.window)
    if spec.chunk is not None:
        visible = visible & (query // spec.chunk == key // spec.chunk)
    return visible
