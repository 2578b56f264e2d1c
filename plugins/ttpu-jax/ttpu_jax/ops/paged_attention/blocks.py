"""Block sizes of the TPU kernel. In: what a device's pages and queries are; out: pages and queries per block for its
kind of device, from `blocks.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LANES = 128


def kernel_blocks(
    kind: str,
    *,
    query_heads: int,
    combined_heads: int,
    dim: int,
    item_bytes: int,
    page_size: int,
    pages: int,
    tokens: int,
    decode: bool,
) -> tuple[int, int]:
    """Pages and queries of one block.

    Args:
        kind: what `jax.Device.device_kind` says.
        query_heads, combined_heads: of one device; the latter are keys' and values' together.
        dim: features per head.
        item_bytes: of one number in pages.
        pages: columns of the table.
        tokens: of the batch.
        decode: each sequence has one query.
    """
    table = _data().get(kind) or _data()["default"]
    share = 8 * (4 // item_bytes)  # heads that the kernel takes at once, where they divide
    taken = share if combined_heads % share == 0 else combined_heads
    rows_per_query = query_heads * taken // combined_heads
    kv_pages = max(1, min(pages, table["kv_tokens"] // page_size))
    queries = min(tokens, table["decode_queries" if decode else "queries"])

    def taken_bytes() -> int:
        keys, rows = kv_pages * page_size, queries * rows_per_query
        buffers = 2 * keys * taken * dim * item_bytes
        # Queries and results twice in flight, accumulator, maximum and sum; scores and their exponentials.
        return buffers + rows * (12 * dim + 8 * LANES) + 8 * rows * keys

    while taken_bytes() > table["vmem_bytes"] and (queries > 1 or kv_pages > 1):
        if queries > 32 or kv_pages == 1:
            queries = max(1, queries // 2)
        elif kv_pages * page_size > 256:
            kv_pages = max(1, kv_pages // 2)
        else:
            queries, kv_pages = (queries // 2, kv_pages) if queries > 8 else (queries, kv_pages // 2)
    return kv_pages, queries


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(Path(__file__).with_name("blocks.json").read_text())
    return data
