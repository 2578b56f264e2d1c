"""Where devices that share heads and MLPs (`tensor`) cut the rows of the residual stream, so that products exchange
them around a ring while they multiply (docs/parallelism.md)."""

from __future__ import annotations

from ttpu_core.sharding.hardware import Chip

STREAM_ROWS = 128
"""Least tokens of each device: products of fewer take less time than sending them on."""
RING_TILE = 32
"""Divides the tokens of a row on each device: two tiles of bfloat16, one for each direction around the ring."""


def cuts_rows(rows: int, tokens: int, devices: int, chip: Chip | None) -> bool:
    """Return whether rows of tokens are cut. They are on chips whose links have two dimensions: with three, an
    all-reduce has more links at once than a ring, and takes as long, or less.

    Args:
        rows: of a replica.
        tokens: of each row.
        devices: that would share them.
        chip: their kind; None is no TPU.
    """
    if chip is None or chip.dimensions != 2:
        return False
    whole_tiles = tokens % (devices * RING_TILE) == 0
    return devices > 1 and whole_tiles and rows * tokens // devices >= STREAM_ROWS
