"""Writing a step's keys and values. In: pages and the new keys and values of a flat batch; out: the pages with them,
the same memory where the pages were donated."""

from __future__ import annotations

import jax

from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import page_size_of, rows_of


def write(kv: PagedKV, key: jax.Array, value: jax.Array | None, batch: RaggedBatch) -> PagedKV:
    """The pages with each token's key [tokens, kv_heads, head_dim] and value [tokens, kv_heads, value_dim] in its slot.

    Args:
        value: None where values are the first features of keys.
    """
    rows, scales = rows_of(kv, key, value)
    size = page_size_of(kv)
    slots = batch.slots[kv.group]
    page, offset = slots // size, slots % size

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        if kv.combined:
            return array.at[page, offset].set(new, mode="promise_in_bounds")
        return array.at[page, :, :, offset].set(new, mode="promise_in_bounds")

    pages = put(kv.pages, rows)
    kept = kv.scales if scales is None or kv.scales is None else put(kv.scales, scales)
    return PagedKV(pages, kept, kv.group, kv.value_in_key, kv.combined)
