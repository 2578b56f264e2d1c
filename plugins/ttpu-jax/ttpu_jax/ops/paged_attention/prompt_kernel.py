"""Attention of steps in which sequences have many queries, to pages on one TPU, as a Pallas kernel. A step of its grid
computes a block of queries, and copies the pages that these see. What reads keys and values out of them (`page_rows`)
depends on how pages hold these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.arithmetic import attention_flops
from ttpu_jax.ops.attention.blockwise import KeptRunning
from ttpu_jax.ops.paged_attention import decode_kernel
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.layout import LANES, page_size_of, parts_of
from ttpu_jax.ops.paged_attention.page_rows import Reader, computed_dtype, read_by_kernels
from ttpu_jax.ops.paged_attention.pieces import Pieces, pieces_of
from ttpu_jax.ops.paged_attention.query_blocks import KeyBlock, QueryBlocks, scalars_of, walk

BLOCK_ROWS = 512
"""The most rows of a block of queries for each KV head: tokens times the query heads that share it."""
BLOCK_KEYS, WINDOW_KEYS = 1024, 512
"""The most tokens of a block of pages, and of one where a window is shorter than the first."""
VMEM_BYTES = {"TPU v4": 13 * 2**20}
MOST_VMEM, USUAL_VMEM = 26 * 2**20, 16 * 2**20
"""What `_block_sizes` lets a step take, by `jax.Device.device_kind` and on others; and what a kernel has unless it asks
for more."""
INTERLEAVED = 256
"""Rows that are computed together. The compiler multiplies for some of them while it takes exponentials of others."""
TILE = 16
"""Rows of a tile of bfloat16: blocks of queries have a multiple of as many tokens."""


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
        kv: pages that the decode kernel reads.
        batch: the flat batch.
        spec: the layer's attention.
        kind: the device kind.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        interpret: run the kernels in the interpreter.
    """
    tokens, heads, group, dim = query.shape
    pieces = pieces_of(spec, batch, kv.group)
    alone = decode_kernel.attend_singles(query, kv, pieces, spec, kind, sinks=sinks, interpret=interpret)
    if batch.max_queries == 1:
        return alone
    width = kv.pages.shape[-1] * parts_of(kv, max(dim, spec.value_dim))
    value_features = -(-spec.value_dim // LANES) * LANES if kv.value_in_key else width
    x = decode_kernel.widened_queries(query, kv, spec)
    sources, reader = read_by_kernels(kv, width, value_features)
    mixed = []
    for first in range(0, group, BLOCK_ROWS // TILE):  # of more heads a block of 16 tokens would not fit
        members = slice(first, min(group, first + BLOCK_ROWS // TILE))
        shape = (heads, members.stop - first, width)
        page_block, size, taken = _block_sizes(kv, spec, pieces.table.shape[1], shape, value_features, tokens, kind)
        part = attend_blocks(
            x[:, :, members], sources, reader, pieces, spec, QueryBlocks.of(kind, tokens, size),
            page_size_of(kv), page_block, value_features=value_features,
            sinks=None if sinks is None else sinks[:, members],
            vmem_bytes=max(USUAL_VMEM, taken * 5 // 4), interpret=interpret, name="paged_prompt_attention",
        )  # fmt: skip
        mixed.append(part[..., : spec.value_dim].astype(query.dtype))
    return alone + (mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=2))


def attend_blocks(
    query: jax.Array,
    sources: tuple[jax.Array, ...],
    reader: Reader,
    pieces: Pieces,
    spec: AttentionSpec,
    blocks: QueryBlocks,
    page_size: int,
    page_block: int,
    *,
    value_features: int,
    sinks: jax.Array | None,
    vmem_bytes: int = USUAL_VMEM,
    interpret: bool,
    name: str,
) -> jax.Array:
    """Attention of the queries of pieces that have several: [tokens, heads, q_per_kv, value_features] in the query's
    dtype, with zeros for the tokens of other pieces.

    Args:
        query: [tokens, heads, q_per_kv, width], as wide as keys are read.
        sources: pages, and what else is kept by pages, [pages, page_size or other, ...] each.
        reader: reads keys and values out of a block of them.
        pieces: of the batch.
        spec: scale, softcap, window.
        blocks: the batch in blocks of queries.
        page_size: tokens per page.
        page_block: pages of a block of keys.
        value_features: of values, as they are read: a multiple of 128.
        sinks: [heads, q_per_kv] logits of attention sinks, or None.
        vmem_bytes: what the kernel may take of VMEM.
        interpret: run the kernel in the interpreter.
        name: of the kernel.
    """
    tokens, heads, group, width = query.shape
    size = blocks.size
    scalars = scalars_of(blocks, pieces, jnp.diff(pieces.starts) > 1, spec.window, page_size, page_block)
    # Rings (`ttpu_jax.ops.matmul.rings`) lay tokens within heads, and results are multiplied as rows of all heads.
    x = jnp.pad(query.transpose(1, 2, 0, 3).reshape(-1, tokens, width), ((0, 0), (0, blocks.padding), (0, 0)))
    if not interpret:  # XLA would copy small pools to VMEM
        sources = tuple(pltpu.with_memory_space_constraint(source, pltpu.HBM) for source in sources)
    logits = jnp.full((heads, group), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    logits = jnp.repeat(logits, size, axis=1)[..., None]

    mixed: jax.Array = pl.pallas_call(
        partial(_kernel, reader=reader, blocks=blocks, spec=spec, page_size=page_size, kept_by_pages=len(sources)),
        out_shape=jax.ShapeDtypeStruct((x.shape[1], heads * group * value_features), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=blocks.grid,
            in_specs=[
                pl.BlockSpec((len(x), size, width), lambda core, turn, *_: (0, blocks.number(core, turn), 0)),
                pl.BlockSpec(logits.shape, lambda *_: (0, 0, 0)),
                *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in sources],
            ],
            out_specs=pl.BlockSpec(
                (size, len(x) * value_features), lambda core, turn, *_: (blocks.number(core, turn), 0)
            ),
            scratch_shapes=[
                *[pltpu.VMEM((2, page_block, *source.shape[1:]), source.dtype) for source in sources],
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                *KeptRunning.scratch(heads, group * size, value_features),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True, vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=_cost(query, sources, pieces, spec, blocks, page_size, page_block),
        interpret=interpret,
        name=name,
    )(*scalars, x, logits, *sources)
    return mixed[:tokens].reshape(tokens, heads, group, value_features)


def _block_sizes(
    kv: PagedKV, spec: AttentionSpec, pages: int, shape: tuple[int, int, int], values: int, tokens: int, kind: str
) -> tuple[int, int, int]:
    """Pages of a block of keys, of a table of `pages` columns, tokens of a block of queries, of `tokens`, where each
    token's queries have the `shape` (kv_heads, q_per_kv, width), and about the bytes of VMEM that these take."""
    heads, group, width = shape
    page_size, item = page_size_of(kv), computed_dtype(kv.pages).itemsize
    page_bytes = kv.pages.nbytes // len(kv.pages)
    most_keys = BLOCK_KEYS if spec.window is None or spec.window >= BLOCK_KEYS else WINDOW_KEYS
    page_block = max(1, min(pages, most_keys // page_size))
    size = max(1, BLOCK_ROWS // group // TILE) * TILE
    size = min(size, -(-tokens // TILE) * TILE)

    def taken() -> int:
        keys, rows = page_block * page_size, size * group
        state = heads * rows * (values + 4 * LANES) * 4  # and sinks
        blocks = 2 * heads * rows * (width + values) * item  # two of queries, two of results
        split = 6 if item == 4 else 0  # a product of float32 is one of three parts in bfloat16
        scores = min(rows, 2 * INTERLEAVED) * keys * (8 + item + split)
        packed = 16 if kv.pages.dtype.itemsize == 1 else 8  # rows in words of 32 bits, and as float32
        apart = kv.combined and not kv.value_in_key
        whole = item + (4 if kv.pages.dtype.itemsize == 1 else 0)  # which are float32 before they are bfloat16
        separate = keys * width * (split + (packed + 2 * item if apart else whole * (1 if kv.value_in_key else 2)))
        return 2 * page_block * page_bytes + state + blocks + scores + separate

    most = VMEM_BYTES.get(kind, MOST_VMEM)
    while taken() > most and (size > TILE or page_block > 1):
        if size > TILE and (size * group >= page_block * page_size or page_block == 1):
            size = max(TILE, size // 2 // TILE * TILE)
        else:
            page_block = max(1, page_block // 2)
    return page_block, size, taken()


def _cost(
    query: jax.Array,
    sources: Sequence[jax.Array],
    pieces: Pieces,
    spec: AttentionSpec,
    blocks: QueryBlocks,
    page_size: int,
    block: int,
) -> pl.CostEstimate:
    """What the kernel has to do where all sequences are equally long, and have as many tokens as their rows of the
    table, or all pages, have room for: each block of queries reads the keys up to its own, in halves of blocks of so
    many pages. Lengths are not known while a program is compiled."""
    tokens, heads, group, _ = query.shape
    half = -(-block // 2)
    pages = max(1, min(pieces.table.size, len(sources[0])) // len(pieces.lengths))
    seen = min(pages, pages - min(pages, tokens / page_size) / 2 + half / 2)
    if spec.window is not None:
        seen = min(seen, (spec.window + blocks.size) / page_size + half)
    page_bytes = sum(source.nbytes // len(source) for source in sources)
    pairs = tokens * seen * page_size
    return pl.CostEstimate(
        flops=int(attention_flops(heads * group, spec, pairs)),
        bytes_accessed=int(blocks.cores * blocks.turns * seen * page_bytes) + 2 * query.nbytes,
        transcendentals=int(heads * group * pairs),
    )


def _kernel(
    spans: Any,
    parts: Any,
    pieces: Any,
    table: Any,
    queries: Any,
    sinks: Any,
    *others: Any,
    reader: Reader,
    blocks: QueryBlocks,
    spec: AttentionSpec,
    page_size: int,
    kept_by_pages: int,
) -> None:
    """A block of queries. queries [heads * q_per_kv, size, width], sinks [heads, q_per_kv * size, 1]; then the sources
    in HBM, out [size, heads * q_per_kv * values], two buffers for each source, semaphores, the next buffer, the state.
    """
    sources, (out, *others) = others[:kept_by_pages], others[kept_by_pages:]  # type: ignore[assignment]
    buffers, (ready, slots, *state) = others[:kept_by_pages], others[kept_by_pages:]
    kept = KeptRunning(*state)
    heads, rows, values = kept.mixed.shape
    group, width = rows // blocks.size, queries.shape[2]
    kept.start(sinks)

    def attend(block: KeyBlock) -> None:
        read = reader([buffer.at[block.slot, pl.ds(0, block.pages)] for buffer in buffers], block.left)
        hidden = jnp.logical_not(block.visible)
        for head in range(heads):
            key, value, scales = read(head)
            query = queries[head * group : (head + 1) * group].reshape(rows, width)
            for first in range(0, rows, INTERLEAVED):
                part = slice(first, min(rows, first + INTERLEAVED))
                before = kept.load(head, first, part.stop - first)
                after = before.attended(query[part], key, value, hidden[part], spec, scales=scales)
                # A value that is not finite must stay with its sequence: times zero it is no number.
                mixed = jnp.where(block.mine[part], after.mixed, before.mixed)
                kept.store(head, after._replace(mixed=mixed), first)

    copies = PageCopies(sources, buffers, ready, table)
    walk(blocks, (spans, parts, pieces, table), copies, slots, spec.window, page_size, group, attend)
    for head in range(heads):
        found = kept.load(head).result().astype(out.dtype)
        for member in range(group):
            place = head * group + member
            out[:, place * values : (place + 1) * values] = found[member * blocks.size : (member + 1) * blocks.size]
