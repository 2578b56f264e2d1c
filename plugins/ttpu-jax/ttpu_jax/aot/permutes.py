"""Which links a collective permute uses, and how many of its messages share one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from ttpu_core.sharding.torus import Route, Torus

from .hlo import Instruction

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_FORWARD, _BACKWARD = "forward", "backward"


def route(permute: Instruction, torus: Torus | None) -> Route:
    """What a collective permute uses of the interconnect.

    Args:
        permute: the instruction. Without pairs it counts as one hop forward.
        torus: the slice's interconnect, with the program's devices in their order. None takes devices that send to one
            another, in a circle or a chain, to lie in the order of their numbers on a ring that closes, and the links
            of all rings in one direction to be used together.
    """
    found = _PAIRS.search(permute.attributes)
    return _route(found[1] if found else "", torus)


@lru_cache(maxsize=64)
def _route(listed: str, torus: Torus | None) -> Route:
    pairs = {int(source): int(target) for source, target in _PAIR.findall(listed)}
    if torus is not None and pairs:
        return torus.route(pairs.items())
    steps = [step for ring in _rings(pairs) for step in _steps(ring, pairs)] or [1]
    hops = max(map(abs, steps))
    return Route(hops, hops, frozenset(_FORWARD if step > 0 else _BACKWARD for step in steps))


def _rings(pairs: dict[int, int]) -> Iterator[list[int]]:
    """Yield the devices of each circle or chain, in the order of their numbers."""
    before = {target: source for source, target in pairs.items()}
    left = dict.fromkeys(pairs)
    while left:
        device = first = next(iter(left))
        while device in before and before[device] != first:
            device = before[device]
        members = [device]
        while (device := pairs.get(device, members[0])) != members[0]:
            members.append(device)
        for member in members:
            left.pop(member, None)
        yield sorted(members)


def _steps(ring: list[int], pairs: dict[int, int]) -> Iterator[int]:
    """Yield how far each device sends along its ring, the shorter way round; two devices are a line."""
    place = {device: number for number, device in enumerate(ring)}
    for source in ring:
        if (target := pairs.get(source, source)) != source:
            forward = (place[target] - place[source]) % len(ring)
            back = forward - len(ring)
            direct = place[target] - place[source]
            yield direct if len(ring) == 2 else forward if forward <= -back else back
