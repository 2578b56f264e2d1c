"""Writes the slot of a contiguous cache that a decode step adds, inside the kernel that reads the cache. Memory is
copied by tiles, so the kernel changes the slot in the tile around it, which it has read anyway, and copies that tile
back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.attention.blocks import LANES, SUBLANES


class SlotWrite(NamedTuple):
    """A block of a cache, and the slot that is written in it.

    Attributes:
        block: in VMEM [rows, ..., slots, features], or [rows, ..., features, slots] if `slots_last`.
        new: in VMEM [rows, ..., several, width], where the new slot's numbers are the first features of one.
        place: which one, counted from the end.
        tile: VMEM for the tile around the slot, see `tile_memory`.
        cache: of all rows in HBM, shaped as the block but for rows and slots.
        first: the block's first row in the cache.
        slot: of the cache, the same in all rows.
        copied: a DMA semaphore.
        slots_last: whether slots are the last dimension.
    """

    block: Any
    new: Any
    place: int
    tile: Any
    cache: Any
    first: Any
    slot: Any
    copied: Any
    slots_last: bool

    def start(self) -> None:
        """Put the new numbers into the block, and begin to copy the tile around them to the cache."""
        size = _tile_slots(self.slots_last)
        features, row = self.block.shape[-2 if self.slots_last else -1], self.new.shape[-2] + self.place
        row = slice(row, row + 1)
        own = self.slot % self.block.shape[-1 if self.slots_last else -2]
        within = pl.ds(pl.multiple_of(own // size * size, size), size)
        for at in _each(self.block.shape[:-2]):
            held = (*at, slice(None), within) if self.slots_last else (*at, within, slice(None))
            kept, new = self.block[held].astype(jnp.float32), self.new[at].astype(jnp.float32)[row, :features]
            if self.slots_last:
                new = _column(new)
            place = jax.lax.broadcasted_iota(jnp.int32, kept.shape, 1 if self.slots_last else 0)
            changed = jnp.where(place == own % size, new, kept).astype(self.block.dtype)
            self.block[held] = changed
            self.tile[at] = changed
        self._copy().start()

    def wait(self) -> None:
        """Wait for the end of what `start` began."""
        self._copy().wait()

    def _copy(self) -> Any:
        rows, size = self.block.shape[0], _tile_slots(self.slots_last)
        within = pl.ds(pl.multiple_of(self.slot // size * size, size), size)
        there = (slice(None), within) if self.slots_last else (within, slice(None))
        between = (slice(None),) * (len(self.block.shape) - 3)
        target = self.cache.at[(pl.ds(self.first, rows), *between, *there)]
        return pltpu.make_async_copy(self.tile, target, self.copied)


def tile_memory(rows: tuple[int, ...], features: int, dtype: Any, *, slots_last: bool) -> Any:
    """VMEM for the tiles of blocks [*rows, slots, features], or [*rows, features, slots] if `slots_last`."""
    size = _tile_slots(slots_last)
    return pltpu.VMEM((*rows, *((features, size) if slots_last else (size, features))), dtype)


def _tile_slots(slots_last: bool) -> int:
    return LANES if slots_last else SUBLANES


def _each(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All indices of an array of these sizes."""
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*before, number) for before in found for number in range(size)]
    return found


def _column(row: jax.Array) -> jax.Array:
    """row [1, features] as [features, 1]: sums of one number and zeros are exact."""
    shape = (row.shape[1], row.shape[1])
    own = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.where(own, row, 0.0).sum(axis=1, keepdims=True)
