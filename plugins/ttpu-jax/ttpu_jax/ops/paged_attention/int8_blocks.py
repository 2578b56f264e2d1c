"""Block sizes of the kernels for int8 pages, from `int8_blocks.json` by device kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LANES = 128
PAIR = 4  # rows of a pair of heads in a token: key, value, key, value
SUBLANES = 8
QUERY_TILE = 16  # rows of a tile of bfloat16


@dataclass(frozen=True)
class Int8Blocks:
    """The blocks of both kernels.

    Args:
        single_pages: pages of a block of keys where a sequence has one query.
        single_queries: sequences of one step of the grid there.
        block_pages: pages of a block of keys where sequences have several queries.
        block_queries: tokens of a block of queries there.
        digits: whether the first kernel multiplies integers.
    """

    single_pages: int
    single_queries: int
    block_pages: int
    block_queries: int
    digits: bool


def int8_blocks(
    kind: str, *, group: int, pairs: int, halves: int, page_size: int, pages: int, tokens: int, sequences: int
) -> Int8Blocks:
    """The blocks for one device.

    Args:
        kind: `jax.Device.device_kind`.
        group: query heads per KV head.
        pairs: pairs of KV heads.
        halves: parts of 128 features per head.
        page_size: tokens per page.
        pages: columns of the block table.
        tokens: tokens of the batch.
        sequences: rows of the block table.
    """
    table = {**_data()["default"], **_data().get(kind, {})}
    token_bytes = PAIR * pairs * (halves * LANES + 4)
    limit = table["vmem_bytes"]

    def single_bytes(count: int) -> int:
        rows = -(-2 * group // SUBLANES) * SUBLANES
        scores = 4 * rows * PAIR * count * page_size
        converted = 0 if table["digits"] else 6 * PAIR * halves * LANES * count * page_size
        return 2 * count * page_size * token_bytes + 8 * scores + converted

    def block_bytes(count: int, queries: int) -> int:
        rows, keys = queries * group, count * page_size
        state = 2 * pairs * rows * (8 * halves * LANES + 8 * LANES + 4 * halves * LANES)
        return 2 * keys * token_bytes + state + 24 * rows * keys + 16 * keys * LANES

    single = max(1, min(pages, table["single_keys"] // page_size))
    while single > 1 and single_bytes(single) > limit:
        single = -(-single // 2)
    several = max(1, min(pages, table["block_keys"] // page_size))
    queries = max(1, table["block_rows"] // group // QUERY_TILE) * QUERY_TILE
    queries = min(queries, -(-tokens // QUERY_TILE) * QUERY_TILE)
    while block_bytes(several, queries) > limit and (several > 1 or queries > QUERY_TILE):
        if several > 2 or queries <= QUERY_TILE:
            several = max(1, several // 2)
        else:
            queries = max(QUERY_TILE, queries // 2 // QUERY_TILE * QUERY_TILE)
    return Int8Blocks(single, min(sequences, table["single_queries"]), several, queries, table["digits"])


def multiplies_integers(kind: str) -> bool:
    """Whether kernels for sequences with one query multiply int8 as integers, by `jax.Device.device_kind`."""
    return bool({**_data()["default"], **_data().get(kind, {})}["digits"])


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(Path(__file__).with_name("int8_blocks.json").read_text())
    return data
