"""Where devices that share heads and MLPs (`tensor`) cut the rows of the residual stream, so that products exchange
them around a ring while they multiply (docs/parallelism.md)."""

from __future__ import annotations

STREAM_ROWS = 128
"""Least tokens of each device: products of fewer take less time than sending them on."""
RING_TILE = 32
"""Divides the tokens of a row on each device: two tiles of bfloat16, one for each direction around the ring."""


def cuts_rows(rows: int, tokens: int, devices: int) -> bool:
    """Return whether rows of tokens are cut on TPUs.

    Args:
        rows: of a replica.
        tokens: of each row.
        devices: that would share them.
    """
    whole_tiles = tokens % (devices * RING_TILE) == 0
    return devices > 1 and whole_tiles and rows * tokens // devices >= STREAM_ROWS
