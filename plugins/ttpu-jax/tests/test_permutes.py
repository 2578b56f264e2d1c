"""Ways and distances of collective permutes, and what they take in a walk of the schedule."""

from __future__ import annotations

from itertools import product

import pytest
from test_aot import entry

from ttpu_core.sharding.links import HOP_SECONDS, permute_seconds
from ttpu_core.sharding.torus import Route, Torus
from ttpu_jax.aot import hlo, schedule
from ttpu_jax.aot.permutes import route
from ttpu_jax.aot.topology import CHIPS

LINK = CHIPS["v5e"].ici_bytes_per_second
BYTES = 2**20 * 4
ONE = permute_seconds(BYTES, LINK)
FORWARD, BACK = [(i, (i + 1) % 8) for i in range(8)], [(i, (i - 1) % 8) for i in range(8)]


def started(name: str, pairs: list[tuple[int, int]]) -> str:
    listed = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    return (
        f"%{name} = (f32[1048576], f32[1048576], u32[], u32[]) collective-permute-start(%p), "
        f"source_target_pairs={{{listed}}}"
    )


def done(name: str) -> str:
    return f"%{name}-done = f32[1048576] collective-permute-done(%{name})"


def seconds(*lines: str, torus: Torus | None = None) -> float:
    return schedule.estimate(entry(*lines, "ROOT %r = f32[8] tuple()"), "v5e", torus=torus).seconds


def read(pairs: list[tuple[int, int]], torus: Torus | None = None) -> Route:
    module = hlo.parse(entry(started("s", pairs), "ROOT %r = f32[8] tuple()"))
    return route(module.body(module.entry)[0], torus)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (FORWARD, 1),
        (BACK, -1),
        ([(i, (i + 3) % 8) for i in range(8)], 3),  # 8 and 3 have no common divisor: one circle
        ([(i, (i + 5) % 8) for i in range(8)], -3),
        ([(0, 2), (2, 4), (4, 6), (6, 0), (1, 3), (3, 5), (5, 7), (7, 1)], 1),  # an axis of 4 outside one of 2
        ([(0, 1), (1, 2), (2, 3)], 1),  # stages of a pipeline
        ([(3, 2), (2, 1), (1, 0)], -1),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], None),  # both directions
        ([], 1),
    ],
)  # fmt: skip
def test_the_way_and_the_links_of_a_permute(pairs: list[tuple[int, int]], expected: int | None) -> None:
    links = {"forward", "backward"} if expected is None else {"forward" if expected > 0 else "backward"}
    assert read(pairs) == Route(abs(expected or 1), abs(expected or 1), frozenset(links))


def test_links_are_those_between_the_chips_of_the_program() -> None:
    around = Torus(((0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)), (2, 4), (False, False), LINK)
    rows = Torus(tuple(product(range(2), range(4))), (2, 4), (False, False), LINK)
    assert read(FORWARD, around) == around.route(FORWARD) != read(FORWARD, rows)
    there, back = started("there", FORWARD), started("back", BACK)
    assert seconds(there, done("there"), torus=around) == pytest.approx(ONE)
    assert seconds(there, back, done("there"), done("back"), torus=around) == pytest.approx(ONE)
    # Row by row a message crosses four links at most, and both ways need the same links.
    long = permute_seconds(BYTES, LINK, hops=4, messages=1)
    assert seconds(there, done("there"), torus=rows) == pytest.approx(long)
    assert seconds(there, back, done("there"), done("back"), torus=rows) == pytest.approx(2 * long)


def test_permutes_of_other_rows_go_on_at_once() -> None:
    rows = Torus(tuple(product(range(2), range(4))), (2, 4), (False, False), LINK)
    first, second = started("first", [(0, 1)]), started("second", [(4, 5)])
    assert seconds(first, second, done("first"), done("second"), torus=rows) == pytest.approx(ONE)
    assert seconds(first, second, done("first"), done("second")) == pytest.approx(2 * ONE)


def test_devices_of_one_chip_count_as_a_link_apart() -> None:
    chip = Torus(((0,), (0,)), (1,), (False,), LINK)
    first, second = started("first", [(0, 1), (1, 0)]), started("second", [(0, 1), (1, 0)])
    assert seconds(first, done("first"), torus=chip) == pytest.approx(ONE)
    assert seconds(first, second, done("first"), done("second"), torus=chip) == pytest.approx(2 * ONE)


def test_permutes_that_send_opposite_ways_go_on_at_once() -> None:
    there, back = started("there", FORWARD), started("back", BACK)
    assert seconds(there, done("there")) == pytest.approx(ONE)
    assert seconds(there, back, done("there"), done("back")) == pytest.approx(ONE)
    again = started("again", FORWARD)
    assert seconds(there, again, done("there"), done("again")) == pytest.approx(2 * ONE)


def test_a_permute_waits_for_the_links_that_an_all_gather_uses() -> None:
    gather = (
        "%g = (f32[131072], f32[1048576]) all-gather-start(%p), dimensions={0}, replica_groups={{0,1,2,3,4,5,6,7}}"
    )
    ended = "%g-done = f32[1048576] all-gather-done(%g)"
    alone = seconds(gather, ended)
    assert alone > 0
    assert seconds(gather, started("s", BACK), ended, done("s")) == pytest.approx(alone + ONE)
    assert seconds(started("s", BACK), gather, ended, done("s")) == pytest.approx(alone + ONE)


def test_data_that_cross_several_links_share_them() -> None:
    far = started("s", [(i, (i + 3) % 8) for i in range(8)])
    assert seconds(far, done("s")) == pytest.approx(3 * ONE)
    line = Torus(tuple((place,) for place in range(4)), (4,), (False,), LINK)
    both = started("s", [(0, 2), (1, 3)])
    assert seconds(both, done("s"), torus=line) == pytest.approx(permute_seconds(BYTES, LINK, hops=2, messages=2))
    assert pytest.approx(BYTES / LINK + 2 * HOP_SECONDS) == ONE
