"""The busiest link of an all-to-all, against counts by hand and the formula for rings."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from ttpu_core.sharding.links import HOP_SECONDS, collective_seconds
from ttpu_core.sharding.torus import Torus


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
