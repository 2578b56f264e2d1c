"""Paged attention in plain JAX. It runs where no kernel serves, and kernels are compared with it. Its cost depends
on the contexts in the batch and not on the block tables' width, and only one block of scores is in memory at a
time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import alibi
from ttpu_jax.ops.attention.reference import FEW_QUERIES, MASKED, query_scores
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import page_size_of, read

CPU_BLOCKS = ((1, 32), (8, 64), (64, 64), (256, 128))
"""(queries, keys) per block on a CPU: the first entry that holds all queries of a sequence is used, else the last. A
block reads at least one page.

With one query, the pages of a block should stay in a core's cache until they have been used twice. With many
queries, XLA:CPU distributes each product over threads, and waking them costs as much as 64 queries (12 layers of
five prompts of 37 to 200 tokens: 180 ms in blocks of 64, 80 ms in these)."""
OTHER_QUERIES, OTHER_KEYS = (16, 128), 256


def reference(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    platform: str = "cpu",
) -> jax.Array:
    """Attention of a flat batch. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype. On a
    CPU sequences are processed one after another. Elsewhere all sequences are processed together, followed one by
    one by those with many queries.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: the layer's pages.
        batch: the flat batch.
        spec: the layer's attention.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        slopes: [kv_heads, q_per_kv] of ALiBi for these heads, or None.
        platform: cpu, tpu or gpu.
    """
    attend = partial(_attend, kv=kv, spec=spec, sinks=sinks, slopes=slopes, on_cpu=platform == "cpu")
    most = batch.max_queries
    if platform == "cpu":
        largest = CPU_BLOCKS[-1][0]
        sizes = [size for size, _ in CPU_BLOCKS if size < most] + [min(most, largest)]
        wide = query.astype(jnp.float32)  # XLA:CPU would convert a whole 16-bit array to update a part of it
        mixed = jnp.zeros((*query.shape[:-1], spec.value_dim), jnp.float32)
        return _one_by_one(wide, mixed, batch, kv.group, attend, sizes, 0).astype(query.dtype)
    few, many = OTHER_QUERIES
    few = most if most <= few else 1
    mixed = _together(query, batch, kv.group, attend, few).astype(query.dtype)
    return mixed if most == few else _one_by_one(query, mixed, batch, kv.group, attend, [min(most, many)], few)


def _together(
    query: jax.Array, batch: RaggedBatch, group: int, attend: partial[jax.Array], block: int
) -> jax.Array:
    """All sequences at once, as if each had `block` queries. Longer ones are left for later."""
    tokens, sequences = query.shape[0], batch.kv_lens.shape[0]
    starts, counts = batch.query_starts[:-1], jnp.diff(batch.query_starts)
    places = jnp.minimum(starts[:, None] + jnp.arange(block), tokens - 1)
    here = (jnp.arange(block) < counts[:, None]) & (counts <= block)[:, None]
    positions = jnp.where(here, (batch.kv_lens - counts)[:, None] + jnp.arange(block), -1)
    mixed = attend(query[places], positions, batch.tables[group])
    rows = jnp.clip(batch.rows, 0, sequences - 1)
    return mixed[rows, jnp.clip(jnp.arange(tokens) - starts[rows], 0, block - 1)]


def _one_by_one(
    query: jax.Array,
    mixed: jax.Array,
    batch: RaggedBatch,
    group: int,
    attend: partial[jax.Array],
    sizes: list[int],
    done: int,
) -> jax.Array:
    """Update `mixed` with the results of sequences of more than `done` queries, in blocks of one of `sizes` queries."""
    tokens = query.shape[0]

    def sequence(row: jax.Array, mixed: jax.Array) -> jax.Array:
        start, count = batch.query_starts[row], batch.query_starts[row + 1] - batch.query_starts[row]
        before, table = batch.kv_lens[row] - count, batch.tables[group][row][None]

        def block(index: jax.Array, mixed: jax.Array, *, size: int) -> jax.Array:
            wanted = start + index * size
            first = jnp.minimum(wanted, tokens - size)
            offsets = first - start + jnp.arange(size)
            here = (offsets < count) & (first + jnp.arange(size) >= wanted)
            positions = jnp.where(here, before + offsets, -1)
            queries = jax.lax.dynamic_slice_in_dim(query, first, size)
            found = attend(queries[None], positions[None], table)[0].astype(mixed.dtype)
            if size > 1:  # the block may contain tokens of other sequences
                others = jax.lax.dynamic_slice_in_dim(mixed, first, size)
                found = jnp.where(here[:, None, None, None], found, others)
            return jax.lax.dynamic_update_slice_in_dim(mixed, found, first, 0)

        # One loop per size, with zero steps if the size does not fit: conditionals would copy `mixed`.
        fewest = done
        for size in sizes:
            fits = (count > fewest) & ((count <= size) | (size == sizes[-1]))
            number = jnp.where(fits, (count + size - 1) // size, 0)
            mixed = jax.lax.fori_loop(0, number, partial(block, size=size), mixed)
            fewest = size
        return mixed

    return jax.lax.fori_loop(0, batch.num_sequences[0], sequence, mixed)


def _attend(
    query: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    *,
    kv: PagedKV,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    on_cpu: bool,
) -> jax.Array:
    """Attention of each row over the pages in its row of the block table.

    query [rows, queries, kv_heads, q_per_kv, head_dim], positions [rows, queries] (negative for no query). The
    result is [rows, queries, kv_heads, q_per_kv, value_dim] in float32, with zeros for no query."""
    rows, queries, heads, group, dim = query.shape
    size = page_size_of(kv)
    keys = next(keys for most, keys in CPU_BLOCKS if queries <= most) if on_cpu else OTHER_KEYS
    together = max(1, keys // size)
    block = together * size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % together)))
    compute = jnp.dtype(jnp.float32) if on_cpu else query.dtype
    turned = query.transpose(0, 2, 3, 1, 4).reshape(rows, heads, group * queries, dim).astype(compute)
    newest = positions.max(1)
    none = jnp.iinfo(jnp.int32).max
    oldest = jnp.maximum(_oldest_visible(jnp.where(positions < 0, none, positions).min(1), spec), 0)
    zeros = jnp.zeros((rows, heads, group, queries), jnp.float32)
    start = zeros + MASKED, zeros
    if sinks is not None:
        start = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], zeros.shape), zeros + 1

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, mixed = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * together, together, 1)
        key, value = read(kv, pages, spec, heads, compute)
        places = index * block + jnp.arange(block)
        # Slots outside the visible range may hold NaN, and 0 * NaN is NaN.
        seen = (places >= oldest[:, None]) & (places <= newest[:, None])
        value = jnp.where(seen[:, None, :, None], value, 0)
        scores = query_scores(turned, key, FEW_QUERIES if on_cpu else 0).reshape(rows, heads, group, queries, block)
        scores = alibi.scaled(scores, spec, positions, places[None], slopes)
        if spec.logit_softcap is not None:
            scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
        visible = _visible(positions[:, :, None], places, spec)[:, None, None]
        scores = jnp.where(visible, scores, MASKED)
        now = jnp.maximum(highest, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - now[..., None]), 0)
        keep = jnp.exp(highest - now)
        flat = weights.reshape(rows, heads, group * queries, block).astype(compute)
        more = jax.lax.dot_general(flat, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        mixed = mixed * keep[..., None] + more.reshape(rows, heads, group, queries, -1)
        return now, total * keep + weights.sum(-1), mixed

    mixed = jnp.zeros((*zeros.shape, spec.value_dim), jnp.float32)
    first, last = oldest.min() // block, newest.max() // block
    _, total, mixed = jax.lax.fori_loop(first, last + 1, step, (*start, mixed))
    mixed = mixed / jnp.where(total == 0, 1, total)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4)


def _oldest_visible(position: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The first position that a query attends to. It may lie before the sequence."""
    oldest = jnp.zeros_like(position)
    if spec.window is not None:
        oldest = jnp.maximum(oldest, position - spec.window + 1)
    if spec.chunk is not None:
        oldest = jnp.maximum(oldest, position // spec.chunk * spec.chunk)
    return oldest


def _visible(query: jax.Array, key: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Which positions a query attends to. None if its own position is negative."""
    visible = (key <= query) & (query >= 0)
    if spec.window is not None:
        visible = visible & (query - key < spec.window)
    if spec.chunk is not None:
        visible = visible & (query // spec.chunk == key // spec.chunk)
    return visible
