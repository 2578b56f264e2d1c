"""Keys and values of pages without scales in VMEM, inside kernels. Two neighbouring rows of combined pages are a head's
key and value for one token. In 16 bits they are one row of 32-bit registers, in 8 bits half of one, and they are
separated there. Combined pages of latents have one row for each token, which is its key, and whose first features are
its value. Split pages have the rows of a head one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.batch import PagedKV
from ttpu_jax.ops.paged_attention.layout import parts_of


def computed_dtype(pages: Any) -> np.dtype[Any]:
    """The dtype in which keys and values of these pages are multiplied: theirs, or bfloat16 for narrower ones."""
    return np.dtype(pages.dtype) if pages.dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


Read = Callable[[Any, int, Any], tuple[jax.Array, jax.Array]]
"""Takes the reference of a block of pages in VMEM, a head, and the number of tokens that are there: the head's keys and
values, with zeros for other tokens, of which memory may hold anything."""


def read_by_kernels(kv: PagedKV, features: int, values: int) -> tuple[jax.Array, Read]:
    """One device's pages as kernels copy them, [pages, ...], and what reads them there.

    Args:
        kv: pages without scales.
        features: of keys, or of values where these have more.
        values: features of values where they are the first ones of keys.
    """
    pages, heads = kv.pages, kv.pages.shape[2]
    if not kv.combined:
        number, planes, _, page_size, width = pages.shape

        def plane(found: Any, head: int, left: Any) -> tuple[jax.Array, jax.Array]:
            key = _rows(found[:, head], left)
            return key, key[:, :values] if planes == 1 else _rows(found[:, heads + head], left)

        return pages.reshape(number, planes * heads, page_size, width), plane
    if kv.value_in_key:
        pages = pages.reshape(*pages.shape[:2], pages.shape[3])

        def latents(found: Any, head: int, left: Any) -> tuple[jax.Array, jax.Array]:
            key = _rows(found[...], left)
            return key, key[:, :values]

        return pages, latents
    padded = heads // (2 * parts_of(kv, features))
    return pages, lambda found, head, left: separated(found, head, padded, left)


def _rows(found: jax.Array, left: Any) -> jax.Array:
    """The rows [tokens, width] of `found` [pages, page_size, width]."""
    number, page_size, width = found.shape
    rows = found.reshape(number * page_size, width)
    if rows.dtype.itemsize == 1:
        rows = rows.astype(jnp.float32).astype(jnp.bfloat16)
    there = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < left
    return jnp.where(there, rows, jnp.zeros_like(rows))


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
