"""Which way a collective permute sends along the rings of its mesh axis, and how far."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .hlo import Instruction

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def hops(permute: Instruction) -> int:
    """Return how many links the farthest data of a collective permute cross; negative where all go backward.

    Devices that send to one another, in a circle or a chain, are taken to lie in the order of their numbers on a ring
    that closes, as devices along a mesh axis do. 0 where directions differ, as where two devices change data: then
    both directions of the links are in use. An instruction without pairs counts as one hop forward.
    """
    found = _PAIRS.search(permute.attributes)
    pairs = {int(source): int(target) for source, target in _PAIR.findall(found[1])} if found else {}
    steps = [step for ring in _rings(pairs) for step in _steps(ring, pairs)]
    if not steps:
        return 1
    if min(steps) < 0 < max(steps):
        return 0
    return max(steps, key=abs)


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
