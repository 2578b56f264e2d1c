"""Keys and values of the pages in VMEM, inside kernels. Two neighbouring rows of a page are a head's key and value for
one token. In 16 bits they are one row of 32-bit registers, whose halves are separated there. Pages of latents have one
row for each token, which is its key, and whose first features are its value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu


def rows_of_latents(pages: Any, left: Any) -> jax.Array:
    """The rows [tokens, width] of `pages` [pages, page_size, width]. Those from token `left` on, of which memory may
    hold anything, are zeros."""
    number, page_size, width = pages.shape
    found = pages[...].reshape(number * page_size, width)
    there = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0) < left
    return jnp.where(there, found, jnp.zeros_like(found))


def separated(pages: Any, head: int, heads: int, left: Any) -> tuple[jax.Array, jax.Array]:
    """The keys and values [tokens, width] of a head in `pages` [pages, page_size, parts * kv_heads * 2, 128]. Those
    from token `left` on, of which memory may hold anything, are zeros."""
    number, page_size, rows, lanes = pages.shape
    tokens, parts = number * page_size, rows // (2 * heads)
    there = jax.lax.broadcasted_iota(jnp.int32, (tokens, lanes), 0) < left
    flat, words = pages.reshape(tokens * rows, lanes), pages.dtype != jnp.float32
    if words:
        flat, rows = flat.bitcast(jnp.uint32), rows // 2

    def loaded(row: int, stride: int) -> jax.Array:
        """Rows `row` of each part of each token, as wide as the head."""
        places = [part * stride + row for part in range(parts)]
        found = [flat[...] if rows == 1 else flat[place::rows, :] for place in places]
        return jnp.concatenate([jnp.where(there, part, jnp.zeros_like(part)) for part in found], axis=1)

    if not words:
        return loaded(2 * head, 2 * heads), loaded(2 * head + 1, 2 * heads)
    both = loaded(head, heads)  # a bfloat16 is the upper half of a float32
    key, value = pltpu.bitcast(both << 16, jnp.float32), pltpu.bitcast((both >> 16) << 16, jnp.float32)
    return key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)
