"""Attention of steps in which sequences have many queries, to pages on one TPU, as a Pallas kernel. A step of its grid
computes a block of queries, and reads the pages that these see once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.arithmetic import attention_flops
from ttpu_jax.ops.attention.blockwise import Running
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.paged_attention import decode_kernel
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.layout import LANES, parts_of
from ttpu_jax.ops.paged_attention.page_rows import rows_of_latents, separated
from ttpu_jax.ops.paged_attention.pieces import Pieces, pieces_of
from ttpu_jax.ops.paged_attention.query_blocks import QueryBlocks, scalars_of, walk

BLOCK_ROWS = 512
"""The most rows of a block of queries for each KV head: tokens times the query heads that share it."""
BLOCK_KEYS = 512
"""The most tokens of a block of pages."""
VMEM_BYTES = 12 * 2**20
"""What `_block_sizes` lets a step take, of the 16 MiB that a kernel has unless it asks for more."""
TILE = 16
"""Rows of a tile of bfloat16: the rows of a block of queries are a multiple of them."""


def attend(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    kind: str,
    *,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one device's queries. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype,
    with zeros for padding. Sequences of one query are left to the kernel for these.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: combined pages that the decode kernel reads.
        batch: the flat batch.
        spec: the layer's attention.
        kind: the device kind.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        interpret: run the kernels in the interpreter.
    """
    tokens, heads, group, _ = query.shape
    single = partial(decode_kernel.attend_singles, query, kv, batch, spec, kind, sinks=sinks, interpret=interpret)
    most = BLOCK_ROWS // TILE
    parts = [slice(first, first + most) for first in range(0, group, most)]
    mixed = [
        _attend(query[:, :, part], kv, batch, spec, kind, None if sinks is None else sinks[:, part], interpret)
        for part in parts
    ]
    rows = jnp.concatenate([part.reshape(tokens, heads, -1) for part in mixed], axis=2).reshape(tokens, -1)
    return (rows + _placed(*single(), tokens)).reshape(tokens, heads, group, -1)


def _placed(found: jax.Array, token: jax.Array, tokens: int) -> jax.Array:
    """The rows [tokens, features] that have `found` [sequences, ...] at `token` [sequences] and zeros elsewhere, as a
    product, which is much faster than to gather as many rows. A number that is not finite makes NaN of its own row
    alone."""
    found = found.reshape(len(found), -1)
    finite = jnp.isfinite(found)
    here = (jnp.arange(tokens)[:, None] == token).astype(found.dtype)
    precision = jax.lax.Precision.HIGHEST if found.dtype == jnp.float32 else None
    rows = jnp.matmul(here, jnp.where(finite, found, 0), precision=precision)
    lost = jnp.logical_not(finite.all(1)).astype(found.dtype)
    return jnp.where((here @ lost)[:, None] > 0, jnp.nan, rows)


def _attend(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    kind: str,
    sinks: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """The same for sequences of several queries: [tokens, kv_heads, q_per_kv * value_dim], with zeros for the tokens of
    other sequences."""
    tokens, heads, group, dim = query.shape
    pages, page_size = kv.pages, kv.pages.shape[1]
    width = pages.shape[3] * parts_of(kv, max(dim, spec.value_dim))
    if kv.value_in_key:
        pages = pages.reshape(len(pages), page_size, width)
    values = -(-spec.value_dim // LANES) * LANES if kv.value_in_key else width
    pieces = pieces_of(spec, batch, kv.group)
    page_block, size = _block_sizes(kv, pieces.table.shape[1], heads, group, width, values, tokens)
    blocks = QueryBlocks.of(kind, tokens, size)
    several = jnp.diff(batch.query_starts) > 1
    owner = jnp.clip(batch.rows[jnp.minimum(pieces.starts[:-1], tokens - 1)], 0, len(several) - 1)
    wanted = (jnp.diff(pieces.starts) > 0) & several[owner]
    scalars = scalars_of(blocks, pieces, wanted, spec.window, page_size, page_block)

    padding = ((0, blocks.padding), (0, 0), (0, 0), (0, width - dim))
    x = jnp.pad(query.astype(pages.dtype), padding).reshape(-1, heads * group * width)
    logits = jnp.full((heads, group), -jnp.inf, jnp.float32)
    if sinks is not None:
        logits = sinks.astype(jnp.float32)
    logits = jnp.repeat(logits, size, axis=1)[..., None]

    def of_queries(features: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, heads * group * features), lambda core, turn, *_: (blocks.number(core, turn), 0))

    state = pltpu.VMEM((heads, group * size, LANES), jnp.float32)
    mixed: jax.Array = pl.pallas_call(
        partial(_kernel, blocks=blocks, spec=spec, page_size=page_size, padded=pages[0, 0].size // (2 * width)),
        out_shape=jax.ShapeDtypeStruct((len(x), heads * group * values), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=blocks.grid,
            in_specs=[
                of_queries(width),
                pl.BlockSpec(logits.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=of_queries(values),
            scratch_shapes=[
                pltpu.VMEM((2, page_block, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                state,
                state,
                pltpu.VMEM((heads, group * size, values), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        cost_estimate=_cost(query, kv, pieces, spec, blocks),
        interpret=interpret,
        name="paged_prompt_attention",
    )(*scalars, x, logits, pages)
    if values == spec.value_dim:
        return mixed[:tokens].reshape(tokens, heads, -1)
    return mixed[:tokens].reshape(tokens, heads, group, values)[..., : spec.value_dim].reshape(tokens, heads, -1)


def _block_sizes(
    kv: PagedKV, pages: int, heads: int, group: int, width: int, values: int, tokens: int
) -> tuple[int, int]:
    """Pages of a block of keys, of a table of `pages` columns, and tokens of a block of queries, of `tokens`."""
    page_size, item = kv.pages.shape[1], kv.pages.dtype.itemsize
    page_bytes = kv.pages.nbytes // len(kv.pages)
    page_block = max(1, min(pages, BLOCK_KEYS // page_size))
    size = max(1, BLOCK_ROWS // group // TILE) * TILE
    size = min(size, -(-tokens // TILE) * TILE)

    def taken() -> int:
        keys, rows = page_block * page_size, size * group
        state = heads * rows * (values + 2 * LANES) * 4
        blocks = 2 * heads * rows * (width + values) * item  # two of queries, two of results
        return 2 * page_block * page_bytes + state + blocks + rows * keys * (8 + item) + keys * width * (8 + 2 * item)

    while taken() > VMEM_BYTES and (size > TILE or page_block > 1):
        if size > TILE and (size * group >= page_block * page_size or page_block == 1):
            size = max(TILE, size // 2 // TILE * TILE)
        else:
            page_block = max(1, page_block // 2)
    return page_block, size


def _cost(
    query: jax.Array, kv: PagedKV, pieces: Pieces, spec: AttentionSpec, blocks: QueryBlocks
) -> pl.CostEstimate:
    """What the kernel has to do where all sequences are equally long, and have as many tokens as their rows of the
    table, or all pages, have room for. Lengths are not known while a program is compiled."""
    tokens, heads, group, dim = query.shape
    pages = min(pieces.table.size, len(kv.pages)) // len(pieces.lengths)
    pairs = tokens * pages * kv.pages.shape[1]
    steps = blocks.cores * blocks.turns
    moved = query.size // dim * (dim + spec.value_dim) * query.dtype.itemsize
    return pl.CostEstimate(
        flops=int(attention_flops(heads * group, spec, pairs)),
        bytes_accessed=steps * pages * (kv.pages.nbytes // len(kv.pages)) + moved,
        transcendentals=heads * group * pairs,
    )


def _kernel(
    spans: Any,
    parts: Any,
    pieces: Any,
    table: Any,
    queries: Any,
    sinks: Any,
    pages: Any,
    out: Any,
    buffer: Any,
    ready: Any,
    slots: Any,
    largest: Any,
    total: Any,
    mixed: Any,
    *,
    blocks: QueryBlocks,
    spec: AttentionSpec,
    page_size: int,
    padded: int,
) -> None:
    """A block of queries. queries [size, kv_heads * q_per_kv * width], out [size, kv_heads * q_per_kv * values], sinks
    [kv_heads, q_per_kv * size, 1]."""
    heads, rows, values = mixed.shape
    group, width = rows // blocks.size, queries.shape[1] * blocks.size // (heads * rows)
    some = sinks[...] > -jnp.inf
    largest[...] = jnp.broadcast_to(jnp.where(some, sinks[...], MASKED), largest.shape)
    total[...] = jnp.broadcast_to(jnp.where(some, 1.0, 0.0), total.shape)
    mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    def state_of(head: int) -> Running:
        return Running(largest[head][:, :1], total[head][:, :1], mixed[head])

    def attend(slot: Any, left: Any, visible: jax.Array) -> None:
        found, hidden = buffer.at[slot], jnp.logical_not(visible)
        for head in range(heads):
            if len(found.shape) == 3:
                key = rows_of_latents(found, left)
                value = key[:, :values]
            else:
                key, value = separated(found, head, padded, left)
            members = range(head * group, (head + 1) * group)
            query = jnp.concatenate([queries[:, place * width : (place + 1) * width] for place in members])
            after = state_of(head).attended(query, key, value, hidden, spec)
            largest[head] = jnp.broadcast_to(after.largest, largest.shape[1:])
            total[head] = jnp.broadcast_to(after.total, total.shape[1:])
            mixed[head] = after.mixed

    copies = PageCopies((pages,), (buffer,), ready, table)
    walk(blocks, (spans, parts, pieces, table), copies, slots, spec.window, page_size, group, attend)
    for head in range(heads):
        found = state_of(head).result().astype(out.dtype)
        for member in range(group):
            place = head * group + member
            out[:, place * values : (place + 1) * values] = found[member * blocks.size : (member + 1) * blocks.size]
