"""Rows that devices send each other, as many as each needs (`jax.lax.ragged_all_to_all`), and where those go that the
experts of several devices are given."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

RAGGED = ("tpu", "gpu")
"""Platforms whose compiler exchanges numbers of rows that are not known in advance."""


class Pieces(NamedTuple):
    """Pieces of rows that a device sends and receives, as many for each device, those of the first device first: int32
    [devices * pieces] each.

    starts: the first row of each piece that it sends.
    sizes: the rows of each piece that it sends.
    lands: the first row of each piece that it sends, on the device that receives it.
    arriving: the rows of each piece that it receives.
    """

    starts: jax.Array
    sizes: jax.Array
    lands: jax.Array
    arriving: jax.Array


def exchange(rows: jax.Array, into: jax.Array, pieces: Pieces, axes: tuple[str, ...], platform: str) -> jax.Array:
    """`into` with the rows that the other devices and this one send to this device. Inside a shard_map.

    Args:
        rows: [rows, ...], of which pieces are sent.
        into: [slots, ...].
        pieces: which rows, and where they land.
        axes: the mesh axes of the devices.
        platform: of the devices. A CPU gathers the rows of all.
    """
    if platform in RAGGED:
        return jax.lax.ragged_all_to_all(rows, into, *pieces, axis_name=axes)
    every, starts, sizes, lands = (jax.lax.all_gather(each, axes) for each in (rows, *pieces[:3]))
    devices, sent = every.shape[:2]
    mine = jax.lax.axis_index(axes)
    starts, sizes, lands = (each.reshape(devices, devices, -1)[:, mine] for each in (starts, sizes, lands))
    slot = jnp.arange(len(into))
    found = (lands[..., None] <= slot) & (slot < (lands + sizes)[..., None])
    row = (jnp.arange(devices) * sent)[:, None, None] + starts[..., None] + slot - lands[..., None]
    chosen = every.reshape(devices * sent, *rows.shape[1:])[jnp.where(found, row, 0).sum((0, 1))]
    return jnp.where(found.any((0, 1)).reshape(-1, *(1,) * (rows.ndim - 1)), chosen, into)


class Deliveries(NamedTuple):
    """Where the assignments of all devices lie, int32 [sources, destinations, experts] each. A source has those of the
    first destination first, and of these those of its first expert; a destination has those of its first expert first,
    and of these those of the first source.

    sizes: the number of assignments.
    starts: of the first, on its source.
    lands: of the first, on its destination, if that had room for all.
    """

    sizes: jax.Array
    starts: jax.Array
    lands: jax.Array

    @property
    def busiest(self) -> jax.Array:
        """The most assignments that a destination has, an int32 scalar."""
        return self.sizes.sum((0, 2)).max()

    def window(self, first: jax.Array | int, room: int, device: jax.Array) -> tuple[Pieces, Pieces, jax.Array]:
        """The exchange of the assignments that have the places from `first` to `first + room` on their destinations.

        Args:
            first: scalar.
            room: rows of a destination's buffer.
            device: scalar, the index of this one.

        Returns:
            The pieces on their way there, those on their way back, and int32 [experts], the rows of each expert of this
            device.
        """
        begin, end = (jnp.clip(each, first, first + room) for each in (self.lands, self.lands + self.sizes))
        sizes, starts, lands = end - begin, self.starts + begin - self.lands, begin - first
        sent, received = sizes[device].reshape(-1), sizes[:, device].reshape(-1)
        there = Pieces(starts[device].reshape(-1), sent, lands[device].reshape(-1), received)
        back = Pieces(lands[:, device].reshape(-1), received, starts[:, device].reshape(-1), sent)
        return there, back, sizes[:, device].sum(0)


def deliveries(sizes: jax.Array) -> Deliveries:
    """Where assignments lie whose numbers are sizes int32 [sources, destinations, experts]."""
    starts = _before(sizes.reshape(len(sizes), -1), 1).reshape(sizes.shape)
    lands = _before(sizes.sum(0), 1) + _before(sizes, 0)
    return Deliveries(sizes, starts, lands)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """The sum of those before each along an axis, in the same shape."""
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes
