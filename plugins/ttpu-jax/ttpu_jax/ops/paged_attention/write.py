"""Writes a step's keys and values into pages. Donated pages are updated in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import (
    TILE_TOKENS,
    has_tiled_scales,
    heads_of,
    page_size_of,
    rows_of,
    rows_of_pairs,
    takes_heads,
)


def write(
    kv: PagedKV,
    key: jax.Array,
    value: jax.Array | None,
    batch: RaggedBatch,
    *,
    context: AttentionContext | None = None,
    by_kernel: bool = True,
    heads_outside: bool = False,
) -> PagedKV:
    """The pages with each token's key and value in its slot. Those of padding tokens may be left out.

    Args:
        kv: the layer's pages.
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim], or None if values are the first features of keys.
        batch: the flat batch.
        context: the mesh, the axes that shard KV heads, the platform. On a TPU kernels write split pages, and those
            with values beside keys; without a context, none does.
        by_kernel: let a kernel write combined pages that are not quantized to int8, else XLA's scatter.
        heads_outside: keys and values are laid out with tokens within heads (`ttpu_jax.ops.matmul.rings`).
    """
    on_tpu = context is not None and context.platform == "tpu"
    if on_tpu and not kv.combined:  # always by a kernel: XLA would copy all pages to write some rows of tiles
        assert context is not None
        new = heads_of(kv, key) if value is None else heads_of(kv, key, value)
        return _by_kernel(kv, new, batch, context)
    by_kernel = by_kernel and on_tpu and kv.scales is None
    if by_kernel and value is not None and heads_outside and takes_heads(kv):
        assert context is not None
        return _by_kernel(kv, heads_of(kv, key, value), batch, context)
    rows, scales = rows_of(kv, key, value)
    if by_kernel and value is not None:
        assert context is not None
        return _by_kernel(kv, (rows,), batch, context)
    size = page_size_of(kv)
    slots = batch.slots[kv.group]
    page, offset = slots // size, slots % size
    token: tuple[Any, ...] = (page, offset) if kv.combined else (page, slice(None), slice(None), offset)
    pages, kept = kv.pages.at[token].set(rows, mode="promise_in_bounds"), kv.scales
    if has_tiled_scales(kv):
        assert kept is not None and scales is not None
        _, planes, heads = scales.shape
        of_head, of_plane = kept.shape[3] // heads, TILE_TOKENS
        first = jnp.arange(heads) * of_head + jnp.arange(planes)[:, None] * of_plane  # column of each tile's scales
        column = first + (offset % TILE_TOKENS)[:, None, None]
        where = page[:, None, None], (offset // TILE_TOKENS)[:, None, None], 0, column
        kept = kept.at[where].set(scales, mode="promise_in_bounds")
    elif kept is not None:
        token = (page, slice(None), offset) if kv.combined else token
        kept = kept.at[token].set(scales, mode="promise_in_bounds")
    return replace(kv, pages=pages, scales=kept)


def write_pairs(
    kv: PagedKV, pairs: jax.Array, batch: RaggedBatch, context: AttentionContext, *, heads_outside: bool
) -> PagedKV:
    """The pages with each token's pair of a key and a value in its slot, written by a kernel for TPUs. Stacking keys
    and values takes a TPU three operations, which pairs leave out.

    Args:
        kv: the layer's pages, which are combined and have no scales.
        pairs: [tokens, kv_heads, 2, dim].
        batch: the flat batch.
        context: the mesh and the axes that shard KV heads.
        heads_outside: pairs are laid out with tokens within heads (`ttpu_jax.ops.matmul.rings`).
    """
    if heads_outside and takes_heads(kv):
        return _by_kernel(kv, heads_of(kv, pairs[:, :, 0], pairs[:, :, 1]), batch, context)
    return _by_kernel(kv, (rows_of_pairs(kv, pairs),), batch, context)


def _by_kernel(kv: PagedKV, new: tuple[jax.Array, ...], batch: RaggedBatch, context: AttentionContext) -> PagedKV:
    """The pages with what is new in the tokens' slots: rows [tokens, rows, width], or what `heads_of` gives."""
    from ttpu_jax.ops.paged_attention import page_write, tile_write

    single, by_heads = batch.max_queries == 1, not kv.combined or len(new) == 2
    slots, starts = batch.slots[kv.group], batch.query_starts
    owners = slots if single else batch.rows  # in the former case nobody reads them

    def run(
        kv: PagedKV, new: tuple[jax.Array, ...], slots: jax.Array, owners: jax.Array, starts: jax.Array
    ) -> PagedKV:
        if not kv.combined:
            return tile_write.write_tiles(kv, *new, slots=slots, starts=starts, single=single)
        if len(new) == 1:
            return replace(kv, pages=page_write.write_rows(kv.pages, new[0], slots, owners, starts, single=single))
        pages = page_write.write_heads(kv.pages, new[0], new[1], slots, owners, starts, single=single)
        return replace(kv, pages=pages)

    if context.mesh is not None:
        heads = context.head_axes or None
        of_rows: Any = PartitionSpec(None, None, heads)
        of_scales: Any = None if kv.scales is None else PartitionSpec(None, None, None, heads)
        of_pages, whole = replace(kv, pages=of_rows, scales=of_scales), PartitionSpec()
        of_new = PartitionSpec(heads) if by_heads else PartitionSpec(None, heads)
        run = jax.shard_map(  # the compiler cannot shard the kernel
            run,
            mesh=context.mesh,
            in_specs=(of_pages, of_new, whole, whole, whole),
            out_specs=of_pages,
            check_vma=False,
        )
    written: PagedKV = run(kv, new, slots, owners, starts)
    return written
