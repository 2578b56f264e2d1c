"""Which dimensions of a slice each mesh axis gets, and the order of devices along an axis.

Rings of sends (ring attention, products that overlap with exchanges) pass data from each device to the next. So each
two in succession should be neighbours on the interconnect, and the last a neighbour of the first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import gcd, prod

import numpy as np

from ttpu_core.sharding.hardware import Chip

Coordinates = tuple[int, ...]
Parts = tuple[tuple[int, int], ...]
"""Dimensions of a slice, or parts of dimensions: pairs of a dimension's number and the size of the part."""


def arranged(places: Sequence[Coordinates], mesh_sizes: Sequence[int], chip: Chip) -> np.ndarray | None:
    """Arrange devices in the shape of a mesh, with each axis along dimensions of the slice.

    On chips whose interconnect has two dimensions, the devices of an axis are in the order of a ring where they fill a
    box. On the others they are in the order of the dimensions, because the compiler gathers over rings there by slower
    programs (docs/decisions/0035-rings.md).

    Args:
        places: the coordinates of each device.
        mesh_sizes: devices along each mesh axis; their product is the number of devices.
        chip: of all devices.

    Returns:
        The indices of the devices, int64 [*mesh_sizes]; None where the devices fill no box that these sizes divide.
    """
    ranges = _ranges(places)
    axes = None if ranges is None else divide([len(values) for values in ranges], mesh_sizes)
    if ranges is None or axes is None:
        return None
    # In the order of places, the last dimension varies first. Each dimension becomes its parts, the outermost of which
    # the first axes have.
    box = np.asarray(sorted(range(len(places)), key=places.__getitem__))
    parts = [(dimension, axis, size) for axis, taken in enumerate(axes) for dimension, size in taken]
    split = sorted(parts)
    found = box.reshape([size for *_, size in split]).transpose([split.index(part) for part in parts])
    found = found.reshape(tuple(mesh_sizes))
    if chip.dimensions > 2:
        return found
    for axis, size in enumerate(mesh_sizes):
        lines = np.moveaxis(found, axis, 0).reshape(size, -1).T
        orders = {tuple(ring_order([places[index] for index in line])) for line in lines.tolist()}
        if len(orders) == 1:  # else another axis would not stay straight
            found = np.take(found, orders.pop(), axis)
    return found


def divide(slice_sizes: Sequence[int], mesh_sizes: Sequence[int]) -> tuple[Parts, ...] | None:
    """Divide the dimensions of a slice among mesh axes, the last axis first, because the last axes exchange most.

    An axis gets whole dimensions where some have its size as their product; where there is a choice most of them, and
    the last (the cores of a chip). Else it gets parts of dimensions, of the largest first. The part that is taken first
    is the innermost of its dimension.

    Args:
        slice_sizes: devices along each dimension of the slice.
        mesh_sizes: devices along each mesh axis; their product is that of `slice_sizes`.

    Returns:
        For each mesh axis its parts; None where the sizes do not divide each other.
    """
    left = dict(enumerate(slice_sizes))
    axes: list[Parts] = []
    for size in reversed(mesh_sizes):
        free = [dimension for dimension, devices in reversed(left.items()) if devices > 1]
        found = [
            some
            for count in range(len(free), 0, -1)
            for some in combinations(free, count)
            if prod(left[dimension] for dimension in some) == size
        ]
        taken = dict.fromkeys(found[0] if found else (), 0)
        for dimension in taken or sorted(free, key=lambda dimension: -left[dimension]):
            part = left[dimension] if found else gcd(left[dimension], size // prod(one or 1 for one in taken.values()))
            if part > 1:
                taken[dimension] = part
                left[dimension] //= part
        if prod(taken.values()) != size:
            return None
        axes.append(tuple(sorted(taken.items())))
    return tuple(reversed(axes))


def ring_order(coordinates: Sequence[Coordinates]) -> list[int]:
    """Order devices so that each is a neighbour of the next, and the last of the first where the slice allows it.

    A line without a wrap-around link stays a line: its last device sends to the first over the links' other direction,
    which nothing else uses.

    Args:
        coordinates: of each device in the slice, all of one length. They must fill a box once, as the devices along a
            mesh axis of whole dimensions do.

    Returns:
        The indices of the devices in their order along the ring, from the one that comes first in the box; their own
        order where they fill no box.
    """
    devices = {place: index for index, place in enumerate(coordinates)}
    ranges = _ranges(coordinates)
    if ranges is None:
        return list(range(len(coordinates)))
    ring = ring_of_box([len(values) for values in ranges])
    return [devices[tuple(values[step] for values, step in zip(ranges, place, strict=True))] for place in ring]


def ring_of_box(sizes: Sequence[int]) -> list[Coordinates]:
    """All places of a box, each beside the next: a Hamiltonian cycle where two sizes are above 1 and one of these is
    even, else a path.

    Args:
        sizes: of the box, in any number of dimensions.
    """
    places = _snake(sizes)
    wide = [dimension for dimension, size in enumerate(sizes) if size > 1]
    if len(wide) < 2 or all(sizes[dimension] % 2 for dimension in wide):
        return places
    # The rows of a grid of two dimensions: one of them is even, and the others, passed like a snake, are its columns.
    even = next(dimension for dimension in wide if sizes[dimension] % 2 == 0)
    columns = _snake([1 if dimension == even else size for dimension, size in enumerate(sizes)])
    ring = []
    for row in range(sizes[even]):
        inner = columns[1:] if row % 2 == 0 else columns[:0:-1]
        ring += [_with(place, even, row) for place in inner]
    back = [_with(columns[0], even, row) for row in reversed(range(sizes[even]))]
    return [back[-1], *ring, *back[:-1]]


def _ranges(places: Sequence[Coordinates]) -> list[list[int]] | None:
    """The coordinates along each dimension of a box; None where the places do not fill one, once each."""
    ranges = [sorted(set(values)) for values in zip(*places, strict=True)]
    filled = len(set(places)) == len(places) == prod(len(values) for values in ranges)
    return ranges if filled and set(product(*ranges)) == set(places) else None


def _snake(sizes: Sequence[int]) -> list[Coordinates]:
    """A path through a box, each place beside the next."""
    places: list[Coordinates] = [()]
    for size in sizes:
        steps = range(size)
        places = [
            (*place, step)
            for index, place in enumerate(places)
            for step in (steps if index % 2 == 0 else reversed(steps))
        ]
    assert len(places) == prod(sizes)
    return places


def _with(place: Coordinates, dimension: int, step: int) -> Coordinates:
    return (*place[:dimension], step, *place[dimension + 1 :])
