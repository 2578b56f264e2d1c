"""JAX's ragged paged attention kernel for TPUs on one device. The kernel walks each sequence's pages from the first
one and knows neither chunks nor the start of a window; it gets block tables that begin there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.blocks import kernel_blocks

LANES = 128
WIDEST_HEAD = 128  # features; Mosaic cannot separate keys and values of wider heads
TABLE_BYTES = 700 << 10  # limit of a block table in a core's scalar memory of 1 MiB, which holds other arrays too


def unserved(spec: AttentionSpec, platform: str, dtype: Any, value_in_key: bool = False) -> str | None:
    """Why the kernel does not serve a layer whose pages have this `dtype`, or None."""
    if platform != "tpu":
        return "it is a kernel for TPUs"
    if value_in_key:
        return "it needs values beside keys, and here values are the keys' first features"
    if spec.sinks:
        return "it has no sinks"
    if max(spec.head_dim, spec.value_dim) > WIDEST_HEAD:
        return f"it serves heads of at most {WIDEST_HEAD} features"
    kept = np.dtype(dtype)
    if kept == np.int8:
        return "it has no scales per token"
    if kept not in (np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(jnp.float8_e4m3fn)):
        return f"it does not read {kept.name}"
    return None


def unserved_batch(spec: AttentionSpec, batch: RaggedBatch, group: int) -> str | None:
    """Why the kernel does not serve this batch of a layer that it serves, or None."""
    sequences, width = _table_shape(spec, batch, group)
    if spec.chunk is not None and spec.chunk % batch.page_size:
        return "chunks must be whole pages"
    if 4 * sequences * width > TABLE_BYTES:
        return f"a table of {sequences} sequences of {width} pages does not fit the scalar memory: use larger pages"
    return None


def padded_heads(heads: int, dtype: np.dtype[Any]) -> int:
    """Number of KV heads per device, padded so that the pages consist of whole tiles."""
    packing = 4 // dtype.itemsize
    while not _tiled(2 * heads, packing):
        heads += 1
    return heads


def attend(query: jax.Array, kv: PagedKV, batch: RaggedBatch, spec: AttentionSpec, kind: str) -> jax.Array:
    """Attention of one device's queries. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: combined pages.
        batch: the flat batch.
        spec: the layer's attention.
        kind: the device kind that selects block sizes.
    """
    tokens, heads, group, dim = query.shape
    combined, width = kv.pages.shape[2:]
    padding = ((0, 0), (0, combined // 2 - heads), (0, 0), (0, width - dim))
    queries = jnp.pad(query, padding).reshape(tokens, combined // 2 * group, width)
    lengths, table, starts, number = _pieces(spec, batch, kv.group)
    kv_pages, q_block = kernel_blocks(
        kind,
        query_heads=queries.shape[1],
        combined_heads=combined,
        dim=width,
        item_bytes=kv.pages.dtype.itemsize,
        page_size=batch.page_size,
        pages=table.shape[1],
        tokens=tokens,
        decode=batch.max_queries == 1,
    )
    quantized = kv.pages.dtype == jnp.float8_e4m3fn
    mixed = ragged_paged_attention(
        queries,
        kv.pages,
        lengths,
        table,
        starts,
        number,
        sm_scale=spec.softmax_scale,
        sliding_window=spec.window,
        soft_cap=spec.logit_softcap,
        k_scale=1.0 if quantized else None,  # a scale makes the kernel convert to the query's dtype before products
        v_scale=1.0 if quantized else None,
        num_kv_pages_per_block=kv_pages,
        num_queries_per_block=q_block,
    )
    mixed = mixed.reshape(tokens, -1, group, width)[:, :heads, :, : spec.value_dim]
    # The kernel leaves blocks without a query uninitialised.
    return jnp.where((batch.positions >= 0)[:, None, None, None], mixed, 0)


def _pieces(
    spec: AttentionSpec, batch: RaggedBatch, group: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """kv_lens, block tables, query_starts and number of sequences for the kernel. Each sequence begins on the first
    page that it attends to, with relative positions. A sequence whose queries lie in several chunks becomes
    several sequences."""
    table, starts, size = batch.tables[group], batch.query_starts, batch.page_size
    counts = jnp.diff(starts)
    rows, width = _table_shape(spec, batch, group)
    if spec.window is None and spec.chunk is None:
        return batch.kv_lens, table, starts, batch.num_sequences
    before = batch.kv_lens - counts
    if spec.chunk is None:
        assert spec.window is not None
        first = jnp.maximum(before - spec.window + 1, 0) // size
        return batch.kv_lens - first * size, _shifted(table, first, width), starts, batch.num_sequences
    here = jnp.arange(len(counts)) < batch.num_sequences[0]
    chunk = before[:, None] // spec.chunk + jnp.arange(rows // len(counts))
    end = jnp.minimum(batch.kv_lens[:, None], (chunk + 1) * spec.chunk)
    queries = jnp.where(here[:, None], end - jnp.maximum(before[:, None], chunk * spec.chunk), 0).reshape(-1)
    order = jnp.argsort(queries <= 0, stable=True)
    queries = jnp.maximum(queries, 0)[order]
    lengths = jnp.where(queries > 0, (end - chunk * spec.chunk).reshape(-1)[order], 0)
    wide = jnp.repeat(table, rows // len(counts), axis=0)[order]
    relocated = _shifted(wide, chunk.reshape(-1)[order] * (spec.chunk // size), width)
    total = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(queries, dtype=jnp.int32)])
    return lengths, relocated, total, (queries > 0).sum(dtype=jnp.int32)[None]


def _table_shape(spec: AttentionSpec, batch: RaggedBatch, group: int) -> tuple[int, int]:
    """Sequences and pages per sequence of the table that `_pieces` makes."""
    sequences, width = batch.tables[group].shape
    if spec.chunk is not None:
        pieces = (batch.max_queries + spec.chunk - 2) // spec.chunk + 1
        return sequences * pieces, min(width, -(-spec.chunk // batch.page_size))
    if spec.window is not None:
        return sequences, min(width, (spec.window + batch.max_queries - 2) // batch.page_size + 2)
    return sequences, width


def _shifted(table: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """`width` columns of each row from its `first` on."""
    columns = jnp.minimum(first[:, None] + jnp.arange(width), table.shape[1] - 1)
    return jnp.take_along_axis(table, columns, axis=1)


def _tiled(heads: int, packing: int) -> bool:
    """Whether the kernel accepts this number of key and value heads per device."""
    tiles, rest = divmod(heads, packing)
    return rest == 0 and (tiles in (1, 2, 4) or tiles % 8 == 0)
