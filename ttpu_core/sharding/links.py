"""How long devices take to exchange data. In: a mesh and the slices under it; out: which links each mesh axis has, and
from those the seconds of one collective, inside a slice and between slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod

from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.strategy import MESH_AXES

# An assumption, no measurement: about a microsecond a hop (jax-ml.github.io/scaling-book), and a ring that is used in
# both directions needs half as many hops.
HOP_SECONDS = 0.5e-6
DCN_SECONDS = 20e-6
"""An assumption too: what one exchange between slices takes whatever its size."""

LINE = 0.5
"""The share of a ring's bandwidth that a line has: no link closes it, so one end sends everything the same way."""

PAIR = 3.0
"""Rings' worth of bandwidth between the two devices of a tpu7x chip: six times one link's, as a line
(cloud.google.com/tpu/docs/tpu7x)."""


def collective_seconds(
    op: str, result_bytes: float, group_size: int, link_bytes_per_second: float, axes: float = 1
) -> float:
    """Time of one collective on a ring that uses both directions of `axes` dimensions of the interconnect.

    `result_bytes`: bytes of the result on one device. The factors are what one device sends, as a share of them, with
    g = group size: an all-gather forwards every shard but its own; a reduce-scatter the same, its result being one
    shard; an all-reduce is both; an all-to-all's pieces travel half as far. Scaling book, section 3, has the algebra.
    """
    if group_size <= 1:
        return 0.0
    others = (group_size - 1) / group_size
    sent = {
        "all-gather": others,
        "reduce-scatter": group_size - 1.0,
        "all-reduce": 2 * others,
        "all-to-all": others / 2,
        "ragged-all-to-all": others / 2,
        "collective-permute": 1.0,
    }[op]
    hops = 1 if op == "collective-permute" else group_size - 1
    return result_bytes * sent / (2 * link_bytes_per_second * axes) + hops * HOP_SECONDS


@dataclass(frozen=True, slots=True)
class Links:
    """The interconnect as a mesh uses it.

    Args:
        rings: mesh axis → how many rings' worth of links it has: one for each dimension that it goes around, half for
            one that is a line.
        inside: mesh axis → devices along it inside one slice.
        slices: mesh axis → slices along it.
        bytes_per_second: of a link, one direction; of a device's share of its host's network card.
    """

    rings: Mapping[str, float]
    inside: Mapping[str, int]
    slices: Mapping[str, int]
    ici_bytes_per_second: float
    dcn_bytes_per_second: float

    def seconds(self, op: str, result_bytes: float, mesh_axes: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of one collective over some mesh axes, on the interconnect and between slices.

        Between slices each device exchanges only its own part of what is reduced, or gathered, inside its slice.
        """
        group = prod(self.inside.get(axis, 1) for axis in mesh_axes)
        slices = prod(self.slices.get(axis, 1) for axis in mesh_axes)
        rings = sum(self.rings.get(axis, 0.0) for axis in mesh_axes if self.inside.get(axis, 1) > 1)
        of_slice = result_bytes if op != "reduce-scatter" else result_bytes * slices
        ici = collective_seconds(op, of_slice, group, self.ici_bytes_per_second, max(rings, LINE))
        if slices == 1:
            return ici, 0.0
        own = result_bytes * (slices if op == "reduce-scatter" else 1) / (1 if op == "reduce-scatter" else group)
        sent = own * (slices - 1) / slices * (2 if op == "all-reduce" else 1)
        return ici, sent / self.dcn_bytes_per_second + DCN_SECONDS


def links_of(mesh: Mapping[str, int], topology: Topology, dcn: Mapping[str, int] | None = None) -> Links:
    """Which links each axis of a mesh has.

    Args:
        dcn: mesh axis → slices along it; None puts slices on the axes that talk least.

    As meshes are laid out (`jax.experimental.mesh_utils`), the last axes get whole dimensions of the slice where their
    sizes allow it, and parts of some otherwise.
    """
    slices = dict(dcn) if dcn is not None else slice_axes(mesh, topology.slices)
    inside = {axis: size // slices.get(axis, 1) for axis, size in mesh.items()}
    left = [_Dimension(size, wraps) for size, wraps in zip(topology.size, topology.wraps, strict=True)]
    if topology.chip.devices_per_chip > 1:
        left.append(_Dimension(topology.chip.devices_per_chip, False, pair=True))
    left = [dimension for dimension in left if dimension.size > 1]
    rings = {}
    for axis in reversed([axis for axis in MESH_AXES if inside.get(axis, 1) > 1]):
        rings[axis] = _take(left, inside[axis])
    devices_per_host = topology.devices_per_slice // (topology.num_hosts // topology.slices)
    return Links(
        rings, inside, slices, topology.chip.ici_bytes_per_second, topology.chip.dcn_bytes_per_second / devices_per_host
    )


def slice_axes(mesh: Mapping[str, int], slices: int) -> dict[str, int]:
    """Slices laid along the first axes that divide: `data`, then `fsdp`, ...; {} for one slice."""
    found, left = {}, slices
    for axis in MESH_AXES:
        if (along := gcd(mesh.get(axis, 1), left)) > 1:
            found[axis] = along
            left //= along
    return found


@dataclass(slots=True)
class _Dimension:
    size: int
    wraps: bool
    pair: bool = False


def _take(left: list[_Dimension], size: int) -> float:
    """Takes `size` devices out of the dimensions that are left; returns their rings."""
    whole = [
        found
        for count in range(1, len(left) + 1)
        for found in combinations(left, count)
        if prod(one.size for one in found) == size
    ]
    if whole:
        taken = list(max(whole, key=lambda found: _rings(tuple(found))))
        for one in taken:
            left.remove(one)
        return _rings(tuple(taken))
    taken = []
    for one in sorted(left, key=lambda one: -one.size):
        if (part := gcd(one.size, size)) > 1:
            taken.append(_Dimension(part, one.wraps and part == one.size, one.pair))
            one.size //= part
            one.wraps = False
            size //= part
    left[:] = [one for one in left if one.size > 1]
    return _rings(tuple(taken)) if taken else LINE


def _rings(dimensions: tuple[_Dimension, ...]) -> float:
    """A ring for each dimension that closes, half for a line; two lines make a grid, whose edge is a ring."""
    outer = [one for one in dimensions if not one.pair]
    if not outer:
        return PAIR
    rings = sum(1.0 if one.wraps else LINE for one in outer)
    return max(rings, 1.0) if len(outer) > 1 else rings
