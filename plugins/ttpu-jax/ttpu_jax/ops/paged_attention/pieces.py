"""A batch as the kernels read it. They walk each sequence's pages from the first one and know no chunks; they get block
tables that begin at the first page that is attended to, and a sequence per chunk."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.paged_attention.batch import RaggedBatch

LARGE = 1e38
"""What stands for numbers that are not finite: its square is not, and its parts in bfloat16 are."""
BESIDE_TABLE = 8  # other numbers that kernels keep of each sequence
TABLE_BYTES = 700 << 10  # limit of a block table in a core's scalar memory of 1 MiB, which holds other arrays too


class Pieces(NamedTuple):
    """Parts of sequences whose queries attend to the same pages: `lengths` [pieces] of their keys, `table` [pieces,
    pages], `starts` [pieces + 1] of their queries, and the `number` [1] of pieces that are present."""

    lengths: jax.Array
    table: jax.Array
    starts: jax.Array
    number: jax.Array


def unserved_batch(spec: AttentionSpec, batch: RaggedBatch, group: int) -> str | None:
    """Why a kernel does not serve this batch of a layer that it serves, or None."""
    sequences, width = _table_shape(spec, batch, group)
    if spec.chunk is not None and spec.chunk % batch.page_size:
        return "chunks must be whole pages"
    if 4 * sequences * (width + BESIDE_TABLE) > TABLE_BYTES:
        return f"a table of {sequences} sequences of {width} pages does not fit the scalar memory: use larger pages"
    return None


def pieces_of(spec: AttentionSpec, batch: RaggedBatch, group: int) -> Pieces:
    """The pieces of a batch. Each sequence begins on the first page that it attends to, with relative positions. A
    sequence whose queries lie in several chunks becomes several pieces."""
    table, starts, size = batch.tables[group], batch.query_starts, batch.page_size
    counts = jnp.diff(starts)
    rows, width = _table_shape(spec, batch, group)
    if spec.window is None and spec.chunk is None:
        return Pieces(batch.kv_lens, table, starts, batch.num_sequences)
    before = batch.kv_lens - counts
    if spec.chunk is None:
        assert spec.window is not None
        first = jnp.maximum(before - spec.window + 1, 0) // size
        return Pieces(batch.kv_lens - first * size, _shifted(table, first, width), starts, batch.num_sequences)
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
    return Pieces(lengths, relocated, total, (queries > 0).sum(dtype=jnp.int32)[None])


def singles_of(pieces: Pieces, tokens: int) -> tuple[Pieces, jax.Array]:
    """The pieces of one query, before places for as many absent ones as there are others, and the token of each in the
    batch, int32 [pieces], which is `tokens` for absent ones."""
    single = jnp.diff(pieces.starts) == 1
    order = jnp.argsort(jnp.logical_not(single), stable=True).astype(jnp.int32)
    number = single.sum(dtype=jnp.int32)
    starts = jnp.minimum(jnp.arange(len(order) + 1, dtype=jnp.int32), number)
    lengths = jnp.where(single, pieces.lengths, 0)[order]
    token = jnp.where(single, pieces.starts[:-1], tokens)[order]
    return Pieces(lengths, pieces.table[order], starts, number[None]), token


def placed(found: jax.Array, token: jax.Array, tokens: int) -> jax.Array:
    """The rows [tokens, ...] that are `found` [pieces, ...] at `token` [pieces], and zeros elsewhere. It is a product,
    since a TPU gathers so many rows slowly. A number that is not finite becomes `LARGE`, with its sign: as it is, it
    would make NaN of all other rows."""
    large = min(LARGE, float(jnp.finfo(found.dtype).max))
    rows = jnp.nan_to_num(found.reshape(len(found), -1), nan=large, posinf=large, neginf=-large)
    here = (jnp.arange(tokens)[:, None] == token).astype(rows.dtype)
    precision = None if rows.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(here, rows, precision=precision).reshape(tokens, *found.shape[1:])


def _table_shape(spec: AttentionSpec, batch: RaggedBatch, group: int) -> tuple[int, int]:
    """Sequences and pages per sequence of the table that `pieces_of` makes."""
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
