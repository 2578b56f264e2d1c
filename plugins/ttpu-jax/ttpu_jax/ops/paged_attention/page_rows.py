"""Keys and values of the pages in VMEM, inside kernels. Two neighbouring rows of a page are a head's key and value for
one token. In 16 bits they are one row of 32-bit registers, in 8 bits half of one, and they are separated there. Pages
of latents have one row for each token, which is its key, and whose first features are its value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu


def computed_dtype(pages: Any) -> np.dtype[Any]:
    """The dtype in which keys and values of these pages are multiplied: theirs, or bfloat16 for narrower ones."""
    return np.dtype(pages.dtype) if pages.dtype.itemsize > 1 else np.dtype(jnp.bfloat16)


def rows_of_latents(pages: Any, left: Any) -> jax.Array:
    """The rows [tokens, width] of `pages` [pages, page_size, width]. Those from token `left` on, of which memory may
    hold anything, are zeros."""
    number, page_size, width = pages.shape
    found = pages[...].reshape(number * page_size, width)
    if pages.dtype.itemsize == 1:
        found = found.astype(jnp.float32).astype(jnp.bfloat16)
    there = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0) < left
    return jnp.where(there, found, jnp.zeros_like(found))


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
