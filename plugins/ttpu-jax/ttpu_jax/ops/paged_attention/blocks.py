"""Block sizes of the TPU kernel: pages and queries per block for a device kind, from `blocks.json`."""

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
    """Pages and queries per block.

    Args:
        kind: `jax.Device.device_kind`.
        query_heads: query heads of one device.
        combined_heads: key and value heads of one device together.
        dim: features per head.
        item_bytes: bytes per element of the pages.
        page_size: tokens per page.
        pages: columns of the block table.
        tokens: tokens of the batch.
        decode: whether each sequence has one query.
    """
    table = _data().get(kind) or _data()["default"]
    share = 8 * (4 // item_bytes)  # heads that the kernel processes at once, if they divide
    taken = share if combined_heads % share == 0 else combined_heads
    rows_per_query = query_heads * taken // combined_heads
    kv_pages = max(1, min(pages, table["kv_tokens"] // page_size))
    queries = min(tokens, table["decode_queries" if decode else "queries"])

    def taken_bytes() -> int:
        keys, rows = kv_pages * page_size, queries * rows_per_query
        buffers = 2 * keys * taken * dim * item_bytes
        # Queries and results are double-buffered; accumulator, maximum and sum; scores and their exponentials.
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
