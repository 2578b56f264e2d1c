"""Devices along a mesh axis are in a ring of neighbours."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ttpu_core.sharding.hardware import chip_named
from ttpu_core.sharding.rings import arranged, divide, ring_of_box, ring_order


def distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [(2, 4), (4, 4), (4, 8), (16, 16), (2, 2), (3, 4), (4, 3), (1, 2, 3), (2, 2, 2), (4, 4, 4), (4, 4, 8), (3, 3, 2),
     (2, 2, 1, 2), (5, 2, 3)],
)  # fmt: skip
def test_a_box_with_an_even_side_is_a_ring(sizes: tuple[int, ...]) -> None:
    ring = ring_of_box(sizes)
    assert len(set(ring)) == len(ring) and all(
        len({step[axis] for step in ring}) == sizes[axis] for axis in range(len(sizes))
    )
    assert {distance(*pair) for pair in pairwise([*ring, ring[0]])} == {1}
    assert ring[0] == (0,) * len(sizes)


@pytest.mark.parametrize("sizes", [(8,), (1, 8), (3, 3), (3, 5), (1,), (1, 1)])
def test_other_boxes_are_paths(sizes: tuple[int, ...]) -> None:
    path = ring_of_box(sizes)
    assert len(set(path)) == len(path) and {distance(*pair) for pair in pairwise(path)} <= {1}


def test_devices_are_ordered_by_their_own_coordinates() -> None:
    coordinates = [(4, 1), (4, 0), (7, 0), (7, 1), (9, 1), (9, 0)]  # a box of 3 x 2, with gaps between
    order = ring_order(coordinates)
    assert sorted(order) == list(range(6)) and coordinates[order[0]] == (4, 0)
    steps = {4: 0, 7: 1, 9: 2}
    ring = [(steps[coordinates[index][0]], coordinates[index][1]) for index in order]
    assert {distance(*pair) for pair in pairwise([*ring, ring[0]])} == {1}


@pytest.mark.parametrize("coordinates", [[(0, 1), (0, 0), (1, 0)], [(0, 0), (0, 0)], [(1, 0), (0, 0), (2, 1), (5, 1)]])
def test_devices_that_fill_no_box_keep_their_order(coordinates: list[tuple[int, ...]]) -> None:
    assert ring_order(coordinates) == list(range(len(coordinates)))


@pytest.mark.parametrize(
    ("slice_sizes", "mesh_sizes", "parts"),
    [
        ((2, 4), (8,), [((0, 2), (1, 4))]),
        ((2, 4), (2, 4), [((0, 2),), ((1, 4),)]),
        ((2, 4), (4, 2), [((1, 4),), ((0, 2),)]),
        ((4, 4), (2, 8), [((0, 2),), ((0, 2), (1, 4))]),
        ((2, 2, 2), (2, 4), [((0, 2),), ((1, 2), (2, 2))]),
        ((2, 2, 1, 2), (4, 2), [((0, 2), (1, 2)), ((3, 2),)]),  # the cores of a chip go to the last axis
        ((4, 4, 4), (4, 1, 16), [((0, 4),), (), ((1, 4), (2, 4))]),
        ((16, 16), (32, 8), [((0, 16), (1, 2)), ((1, 8),)]),
        ((2, 4), (3,), None),
        ((3, 4), (2, 6), [((1, 2),), ((0, 3), (1, 2))]),
    ],
)
def test_axes_get_dimensions_the_last_first(slice_sizes: Any, mesh_sizes: Any, parts: Any) -> None:
    found = divide(slice_sizes, mesh_sizes)
    assert found == (None if parts is None else tuple(parts))


def test_meshes_of_flat_slices_are_rings_and_others_keep_the_order_of_dimensions() -> None:
    flat = [(index % 2, index // 2, 0) for index in range(8)]
    found = arranged(flat, (8,), chip_named("v5e"))
    assert found is not None and found.tolist() == [flat.index((x, y, 0)) for x, y, _ in ring_of_box((2, 4, 1))]
    rows = arranged(flat, (2, 4), chip_named("v5e"))
    assert rows is not None and rows.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    cube = [(index // 4, index // 2 % 2, index % 2) for index in range(8)]
    deep = arranged(cube, (8,), chip_named("v5p"))
    assert deep is not None and deep.tolist() == list(range(8))
    assert arranged(flat[:7], (7,), chip_named("v5e")) is None
