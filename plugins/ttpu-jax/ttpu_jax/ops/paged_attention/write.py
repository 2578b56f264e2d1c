"""Writes a step's keys and values into pages. Donated pages are updated in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import page_size_of, rows_of


def write(kv: PagedKV, key: jax.Array, value: jax.Array | None, batch: RaggedBatch) -> PagedKV:
    """The pages with each token's key and value in its slot.

    Args:
        kv: the layer's pages.
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim], or None if values are the first features of keys.
        batch: the flat batch.
    """
    rows, scales = rows_of(kv, key, value)
    size = page_size_of(kv)
    slots = batch.slots[kv.group]
    page, offset = slots // size, slots % size
    token: tuple[Any, ...] = (page, offset) if kv.combined else (page, slice(None), slice(None), offset)
    pages, kept = kv.pages.at[token].set(rows, mode="promise_in_bounds"), kv.scales
    if kept is not None:
        token = (page, slice(None), offset) if kv.combined else token
        kept = kept.at[token].set(scales, mode="promise_in_bounds")
    return replace(kv, pages=pages, scales=kept)
