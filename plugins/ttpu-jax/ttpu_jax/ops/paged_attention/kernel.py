"""JAX's ragged paged attention kernel for TPUs on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.blocks import kernel_blocks
from ttpu_jax.ops.paged_attention.pieces import pieces_of

LANES = 128
WIDEST_HEAD = 128  # features; Mosaic cannot separate keys and values of wider heads


def unserved(spec: AttentionSpec, platform: str, dtype: Any, value_in_key: bool = False) -> str | None:
    """Why the kernel does not serve a layer whose pages have this `dtype`, or None."""
    if platform != "tpu":
        return "it is a kernel for TPUs"
    if value_in_key:
        return "it needs values beside keys, and here values are the keys' first features"
    if spec.alibi is not None:
        return "it has no ALiBi"
    kept = np.dtype(dtype)
    if spec.sinks:
        return "it has no sinks"
    if max(spec.head_dim, spec.value_dim) > WIDEST_HEAD:
        return f"it serves heads of at most {WIDEST_HEAD} features"
    if kept not in (np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(jnp.float8_e4m3fn)):
        return f"it does not read {kept.name}"
    return None


def padded_heads(heads: int, dtype: np.dtype[Any], halves: int = 1) -> int:
    """Number of KV heads per device, padded so that the pages consist of whole tiles. `halves`: rows per key."""
    packing = 4 // dtype.itemsize
    while 2 * heads % packing or not _tiled(2 * heads * halves, packing):
        heads += 1
    return heads


def attend(query: jax.Array, kv: PagedKV, batch: RaggedBatch, spec: AttentionSpec, kind: str) -> jax.Array:
    """Attention of one device's queries. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype.
    The kernel leaves blocks of tokens without a query uninitialised.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: combined pages.
        batch: the flat batch.
        spec: the layer's attention.
        kind: the device kind that selects block sizes.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    tokens, heads, group, dim = query.shape
    combined, width = kv.pages.shape[2:]
    padding = ((0, 0), (0, combined // 2 - heads), (0, 0), (0, width - dim))
    queries = jnp.pad(query, padding).reshape(tokens, combined // 2 * group, width)
    lengths, table, starts, number = pieces_of(spec, batch, kv.group)
    kv_pages, q_block = kernel_blocks(
        kind,
        query_heads=queries.shape[1],
        combined_heads=combined,
        dim=width,
        item_bytes=kv.pages.dtype.itemsize,
        page_size=batch.page_size,
        pages=table.shape[1],
        tokens=tokens,
        decode=batch.max_queries == 1,
    )
    quantized = kv.pages.dtype == jnp.float8_e4m3fn
    mixed = ragged_paged_attention(
        queries,
        kv.pages,
        lengths,
        table,
        starts,
        number,
        sm_scale=spec.softmax_scale,
        sliding_window=spec.window,
        soft_cap=spec.logit_softcap,
        k_scale=1.0 if quantized else None,  # a scale makes the kernel convert to the query's dtype before products
        v_scale=1.0 if quantized else None,
        num_kv_pages_per_block=kv_pages,
        num_queries_per_block=q_block,
    )
    return mixed.reshape(tokens, -1, group, width)[:, :heads, :, : spec.value_dim]


def _tiled(heads: int, packing: int) -> bool:
    """Whether the kernel accepts this number of key and value heads per device."""
    tiles, rest = divmod(heads, packing)
    return rest == 0 and (tiles in (1, 2, 4) or tiles % 8 == 0)
