"""The links that messages cross, and the busiest of them, against counts by hand and the formula for rings."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from ttpu_core.sharding.links import HOP_SECONDS, collective_seconds
from ttpu_core.sharding.torus import Route, Torus


def torus(sizes: tuple[int, ...], *wraps: bool) -> Torus:
    return Torus(tuple(product(*map(range, sizes))), sizes, wraps, 45e9)


@pytest.mark.parametrize(
    ("sizes", "wraps", "busiest"),
    [
        ((2,), (False,), 1),
        ((8,), (True,), 8),  # of 8 messages each, a quarter of the ring far on average, both ways
        ((8,), (False,), 16),  # 4 devices send to 4 others across the middle
        ((2, 4), (False, False), 8),
        ((4, 4), (True, True), 8),
        ((4, 4, 4), (True, True, True), 32),
    ],
)
def test_messages_on_the_busiest_link(sizes: tuple[int, ...], wraps: tuple[bool, ...], busiest: float) -> None:
    assert torus(sizes, *wraps).busiest_link([range(prod(sizes))]) == busiest


def test_groups_share_links() -> None:
    grid = torus((2, 4), False, False)
    rows = [range(4), range(4, 8)]
    assert grid.busiest_link(rows) == grid.busiest_link(rows[:1]) == 4
    apart = [(0, 2), (1, 3)]  # both cross the link between 1 and 2
    assert grid.busiest_link(apart) == 2


def test_devices_of_one_chip_exchange_nothing_between_chips() -> None:
    pairs = Torus(((0,), (0,), (1,), (1,)), (2,), (False,), 45e9)
    assert pairs.busiest_link([(0, 1), (2, 3)]) == 0
    assert pairs.busiest_link([range(4)]) == 4


@pytest.mark.parametrize("line", [2, 4, 8, 16])
def test_the_formula_for_a_line_is_its_time_too(line: int) -> None:
    counted = torus((line,), False).all_to_all_seconds(2**26, [range(line)])
    assert counted == pytest.approx(collective_seconds("all-to-all", 2**26, line, 45e9, 0.5), rel=0.01)


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (4, 4, 4)])
def test_the_formula_for_rings_is_the_torus_time(sizes: tuple[int, ...]) -> None:
    devices, size = prod(sizes), 2**26
    counted = torus(sizes, *(True,) * len(sizes)).all_to_all_seconds(size, [range(devices)])
    formula = collective_seconds("all-to-all", size, devices, 45e9, len(sizes))
    assert counted == pytest.approx(formula, abs=devices * HOP_SECONDS)
    assert counted < collective_seconds("all-gather", size * devices, devices, 45e9, len(sizes))


RING_OF_2X4 = [0, 1, 2, 3, 7, 6, 5, 4]  # around the grid
ROWS_OF_2X4 = [0, 1, 2, 3, 4, 5, 6, 7]


def way(of: Torus, devices: list[int], step: int) -> Route:
    return of.route((device, devices[(place + step) % len(devices)]) for place, device in enumerate(devices))


def test_a_ring_around_a_grid_uses_each_link_once_in_each_direction() -> None:
    grid = torus((2, 4), False, False)
    there, back = way(grid, RING_OF_2X4, 1), way(grid, RING_OF_2X4, -1)
    assert (there.messages, there.hops, len(there.links)) == (back.messages, back.hops, len(back.links)) == (1, 1, 8)
    assert there.links.isdisjoint(back.links)


def test_devices_row_by_row_cross_several_links_and_need_those_of_the_other_way() -> None:
    grid = torus((2, 4), False, False)
    there, back = way(grid, ROWS_OF_2X4, 1), way(grid, ROWS_OF_2X4, -1)
    # From 3 to 4 and from 7 to 0 it is 4 hops, first to the other row and then back along it.
    assert (there.messages, there.hops) == (back.messages, back.hops) == (1, 4)
    assert not there.links.isdisjoint(back.links)


@pytest.mark.parametrize(("step", "messages", "hops"), [(1, 1, 1), (3, 3, 3), (4, 2, 4), (5, 3, 3)])
def test_a_ring_that_closes_sends_the_shorter_way(step: int, messages: float, hops: int) -> None:
    ring = way(torus((8,), True), list(range(8)), step)
    assert (ring.messages, ring.hops) == (messages, hops)  # of messages half way round, half take each way
    assert len(ring.links) == (16 if step == 4 else 8)


def test_devices_of_one_chip_send_over_a_link_of_its_own() -> None:
    pairs = Torus(((0,), (0,), (1,), (1,)), (2,), (False,), 45e9)
    there, back = pairs.route([(0, 1), (2, 3)]), pairs.route([(1, 0), (3, 2)])
    assert there == Route(1, 1, frozenset({((0,), -1, 1), ((1,), -1, 1)}))
    assert there.links.isdisjoint(back.links)
    around = pairs.route([(0, 1), (1, 2), (2, 3), (3, 0)])
    assert (around.messages, around.hops, len(around.links)) == (1, 1, 4)
    assert pairs.route([(0, 0), (1, 1)]) == Route(0, 0, frozenset())


def test_messages_share_a_link_that_all_cross() -> None:
    line = torus((4,), False)
    assert line.route([(0, 2), (1, 3)]) == Route(2, 2, frozenset(((at,), 0, 1) for at in range(3)))
