"""Keys and values of pages in VMEM, inside kernels. Two neighbouring rows of combined pages are a head's key and value
for one token. In 16 bits they are one row of 32-bit registers, in 8 bits half of one, and they are separated there.
Combined pages of latents have one row for each token, which is its key, and whose first features are its value. Split
pages have the rows of a head one after another, and those of int8 have scales for each tile of 32 tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.batch import PagedKV
from ttpu_jax.ops.paged_attention.layout import LANES, TILE_TOKENS, parts_of


def computed_dtype(pages: Any) -> np.dtype[Any]:
    """The dtype in which keys and values of these pages are multiplied: theirs, or bfloat16 for narrower ones."""
    return np.dtype(pages.dtype) if pages.dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


class BlockKeys(NamedTuple):
    """One head's keys [keys, width] and values [keys, values] of a block of pages. The scales of integers are float32
    [1, keys] each, of keys and of values; None for floats."""

    key: jax.Array
    value: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None


Reader = Callable[[Sequence[Any], Any], Callable[[int], BlockKeys]]
"""Takes references of a block of pages, and the number of its tokens that are there. Returns what gives a head's keys
and values. Of other tokens memory may hold anything; their keys and values are finite, and the scales of values too."""


def read_by_kernels(
    kv: PagedKV, features: int, values: int, *, integers: bool = False
) -> tuple[tuple[jax.Array, ...], Reader]:
    """One device's pages as kernels copy them, [pages, ...] each, and what reads them there.

    Args:
        kv: pages without scales, or split ones.
        features: of keys, or of values where these have more.
        values: features of values where they are the first ones of keys.
        integers: give int8 as it is.
    """
    pages, heads = kv.pages, kv.pages.shape[2]
    if not kv.combined:
        number, planes, _, page_size, width = pages.shape

        def split(sources: Sequence[Any], left: Any) -> Callable[[int], BlockKeys]:
            found, *scales = sources

            def read(head: int) -> BlockKeys:
                key = _rows(found[:, head], left, integers)
                value = key[:, :values] if planes == 1 else _rows(found[:, heads + head], left, integers)
                if not scales:
                    return BlockKeys(key, value)
                of_head = scales[0].shape[3] // heads
                of_planes = [_scales(scales[0], head * of_head + n * TILE_TOKENS, left) for n in range(planes)]
                return BlockKeys(key, value, (of_planes[0], of_planes[-1]))

            return read

        rows = pages.reshape(number, planes * heads, page_size, width)
        return (rows,) if kv.scales is None else (rows, kv.scales), split
    if kv.value_in_key:
        pages = pages.reshape(*pages.shape[:2], pages.shape[3])

        def latents(sources: Sequence[Any], left: Any) -> Callable[[int], BlockKeys]:
            key = _rows(sources[0][...], left, False)
            return lambda _: BlockKeys(key, key[:, :values])

        return (pages,), latents
    padded = heads // (2 * parts_of(kv, features))
    return (pages,), lambda sources, left: lambda head: BlockKeys(*separated(sources[0], head, padded, left))


def _rows(found: jax.Array, left: Any, integers: bool) -> jax.Array:
    """The rows [tokens, width] of `found` [pages, page_size, width]. Those of 8 bits become bfloat16, unless `integers`
    are wanted."""
    number, page_size, width = found.shape
    rows = found.reshape(number * page_size, width)
    if rows.dtype == jnp.int8:  # which are finite, also those that memory holds behind a sequence
        return rows if integers else rows.astype(jnp.float32).astype(jnp.bfloat16)
    if rows.dtype.itemsize == 1:
        rows = rows.astype(jnp.float32).astype(jnp.bfloat16)
    there = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < left
    return jnp.where(there, rows, jnp.zeros_like(rows))


def _scales(found: Any, column: int, left: Any) -> jax.Array:
    """The scales [1, tokens] that lie in 32 columns of `found` [pages, tiles, 1, columns] from `column` on."""
    pages, tiles, _, lanes = found.shape
    flat, own = found.reshape(pages * tiles, lanes), slice(column // LANES * LANES, (column // LANES + 1) * LANES)
    in_row = min(LANES // TILE_TOKENS, pages * tiles)  # tiles whose scales fill a row of the result
    whole = pages * tiles // in_row
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def loaded(first: int, count: int) -> jax.Array:
        """The rows of `count` tiles from `first` on, each `in_row` tiles after the one before."""
        if count > 1 and lanes == LANES:  # others cannot be loaded with a stride
            return flat[pl.ds(first, count, stride=in_row), own]
        return jnp.concatenate([flat[pl.ds(first + number * in_row, 1), own] for number in range(count)])

    def rows(first: int, count: int, places: int) -> jax.Array:
        """`count` rows of scales, each of `places` neighbouring tiles from `first` on."""
        row = jnp.zeros((count, LANES), jnp.float32)
        for place in range(places):
            moved = pltpu.roll(loaded(first + place, count), (place * TILE_TOKENS - column) % LANES, 1)
            row = jnp.where(lane // TILE_TOKENS == place, moved, row)
        return row

    found_rows = rows(0, whole, in_row)
    kept = [found_rows[row : row + 1] for row in range(whole)]
    if rest := pages * tiles - whole * in_row:
        kept.append(rows(whole * in_row, 1, rest))
    every = [jnp.where(lane < left - place * LANES, row, 0.0) for place, row in enumerate(kept)]  # others: anything
    return jnp.concatenate(every, axis=1)[:, : pages * tiles * TILE_TOKENS]


def separated(pages: Any, head: int, heads: int, left: Any) -> tuple[jax.Array, jax.Array]:
    """The keys and values [tokens, width] of a head in `pages` [pages, page_size, parts * kv_heads * 2, 128]. Those
    from token `left` on, of which memory may hold anything, are zeros."""
    number, page_size, rows, lanes = pages.shape
    tokens, parts, packed = number * page_size, rows // (2 * heads), 4 // pages.dtype.itemsize
    there = jax.lax.broadcasted_iota(jnp.int32, (tokens, lanes), 0) < left
    flat = pages.reshape(tokens * rows, lanes)
    if packed > 1:
        flat, rows = flat.bitcast(jnp.uint32), rows // packed

    def loaded(row: int) -> jax.Array:
        """The row of each part of each token that holds row `row` of the first part, as wide as the head."""
        places = [(2 * part * heads + row) // packed for part in range(parts)]
        found = [flat[...] if rows == 1 else flat[place::rows, :] for place in places]
        return jnp.concatenate([jnp.where(there, part, jnp.zeros_like(part)) for part in found], axis=1)

    if packed == 1:
        return loaded(2 * head), loaded(2 * head + 1)
    words = loaded(2 * head)
    if packed == 2:  # a bfloat16 is the upper half of a float32
        key, value = pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast((words >> 16) << 16, jnp.float32)
        return key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)
    first = 2 * (head % 2)
    key, value = ((words >> (8 * entry)).astype(jnp.uint8) for entry in (first, first + 1))
    key, value = (pltpu.bitcast(each, pages.dtype).astype(jnp.float32) for each in (key, value))
    return key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)
