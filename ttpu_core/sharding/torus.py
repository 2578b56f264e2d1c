"""An interconnect as a torus or grid of chips: which links messages cross, and how many cross the busiest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ttpu_core.sharding.links import HOP_SECONDS

Place = tuple[int, ...]
Link = tuple[Place, int, int]
"""A link in one direction: the place before it, its dimension (-1 within a chip), and 1 or -1."""


@dataclass(frozen=True)
class Route:
    """What devices that each send one message use of the interconnect.

    Attributes:
        messages: that cross the busiest link in one direction; a message with two shortest ways counts half on each.
        hops: links that a message crosses, at most.
        links: that any message crosses.
    """

    messages: float
    hops: int
    links: frozenset[Hashable]


@dataclass(frozen=True)
class Torus:
    """Devices on the chips of a slice.

    Attributes:
        places: the coordinates of each device's chip.
        sizes: chips along each dimension.
        wraps: whether a dimension closes into a ring.
        link_bytes_per_second: bandwidth of a link in one direction.
    """

    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]
    link_bytes_per_second: float

    def all_to_all_seconds(self, result_bytes: float, groups: Sequence[Sequence[int]]) -> float:
        """Time in which each device of a group sends equal shares to all others of its group, all groups at once.

        Args:
            result_bytes: that a device receives, its own share included.
            groups: devices; all groups have the same size.
        """
        shares = _busiest_link(self, tuple(map(tuple, groups)))
        sent = shares * result_bytes / len(groups[0])
        return sent / self.link_bytes_per_second + self.diameter * HOP_SECONDS

    @property
    def diameter(self) -> int:
        """Links between the two devices that are furthest apart."""
        return sum(size // 2 if wraps else size - 1 for size, wraps in zip(self.sizes, self.wraps, strict=True))

    def route(self, pairs: Iterable[tuple[int, int]]) -> Route:
        """The way of messages between pairs of devices, source first, that are sent at once. A message takes the
        shortest way, one dimension after the other; half of those with two shortest ways take each. Devices of one chip
        count as a link apart, which is the chip's own."""
        given = list(pairs)
        loads, hops = self._loads(given)
        for source, destination in given:
            if source != destination and self.places[source] == self.places[destination]:
                own = self.places[source], -1, 1 if source < destination else -1
                loads[own] += 1
                hops = max(hops, 1)
        return Route(max(loads.values(), default=0), hops, frozenset(loads))

    def busiest_link(self, groups: Iterable[Sequence[int]]) -> float:
        """How many messages cross the busiest link in one direction, if each device sends one to each other device of
        its group, by the ways of `route`."""
        loads, _ = self._loads(pair for group in groups for pair in product(group, group))
        return max(loads.values(), default=0)

    def _loads(self, pairs: Iterable[tuple[int, int]]) -> tuple[defaultdict[Link, float], int]:
        """The messages on each link, and the links that a message crosses at most."""
        loads: defaultdict[Link, float] = defaultdict(float)
        farthest = 0.0
        for source, destination in pairs:
            hops = 0.0
            for link, share in self._crossed(self.places[source], self.places[destination]):
                loads[link] += share
                hops += share
            farthest = max(farthest, hops)
        return loads, round(farthest)

    def _crossed(self, source: Place, destination: Place) -> Iterator[tuple[Link, float]]:
        """The links of a message: the place before each, its dimension and direction, and the share that takes it."""
        place = list(source)
        for dimension, (size, wraps) in enumerate(zip(self.sizes, self.wraps, strict=True)):
            ahead = destination[dimension] - source[dimension]
            ways = [(1 if ahead > 0 else -1, abs(ahead), 1.0)]
            if wraps:
                forward = ahead % size
                ways = [(1, forward, 1.0), (-1, size - forward, 1.0)]
                least = min(forward, size - forward)
                ways = [(step, hops, 0.5 if 2 * least == size else 1.0) for step, hops, _ in ways if hops == least]
            for step, hops, share in ways:
                at = source[dimension]
                for _ in range(hops):
                    yield ((*place[:dimension], at, *place[dimension + 1 :]), dimension, step), share
                    at = (at + step) % size
            place[dimension] = destination[dimension]


@lru_cache(maxsize=64)
def _busiest_link(torus: Torus, groups: tuple[tuple[int, ...], ...]) -> float:
    return torus.busiest_link(groups)
