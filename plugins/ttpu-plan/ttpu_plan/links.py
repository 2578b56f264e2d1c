"""Predicts how long devices take to exchange data: which interconnect links each mesh axis has on given slices, and
the time of a collective over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod

from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.links import DCN_SECONDS, collective_seconds, dcn_seconds, slice_axes
from ttpu_core.sharding.strategy import MESH_AXES

LINE = 0.5
"""A line's share of a ring's bandwidth: no link closes the line, so an end sends all data in one direction."""

PAIR = 3.0
"""Bandwidth between the two devices of a tpu7x chip, in rings: six times the bandwidth of one link in a line
(cloud.google.com/tpu/docs/tpu7x)."""


@dataclass(frozen=True, slots=True)
class Links:
    """The interconnect as a mesh uses it.

    Args:
        rings: mesh axis → its bandwidth in rings: one for each dimension that closes, half for a line.
        inside: mesh axis → devices along it inside one slice.
        slices: mesh axis → slices along it.
        ici_bytes_per_second: bandwidth of one link in one direction.
        dcn_bytes_per_second: one device's share of its host's network card.
    """

    rings: Mapping[str, float]
    inside: Mapping[str, int]
    slices: Mapping[str, int]
    ici_bytes_per_second: float
    dcn_bytes_per_second: float

    def seconds(self, op: str, result_bytes: float, mesh_axes: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of one collective over some mesh axes: on the interconnect, and between slices.

        Between slices, each device exchanges only its own part of the data that was reduced or gathered inside its
        slice."""
        group = prod(self.inside.get(axis, 1) for axis in mesh_axes)
        slices = prod(self.slices.get(axis, 1) for axis in mesh_axes)
        rings = sum(self.rings.get(axis, 0.0) for axis in mesh_axes if self.inside.get(axis, 1) > 1)
        of_slice = result_bytes if op != "reduce-scatter" else result_bytes * slices
        ici = collective_seconds(op, of_slice, group, self.ici_bytes_per_second, max(rings, LINE))
        if slices == 1:
            return ici, 0.0
        own = result_bytes if op == "reduce-scatter" or "all-to-all" in op else result_bytes / group
        return ici, dcn_seconds(op, own, slices, self.dcn_bytes_per_second) + DCN_SECONDS


def links_of(mesh: Mapping[str, int], topology: Topology, dcn: Mapping[str, int] | None = None) -> Links:
    """The links of each mesh axis.

    Meshes are laid out as by `jax.experimental.mesh_utils`: the last axes get whole dimensions of the slice if their
    sizes allow it, else parts of dimensions.

    Args:
        mesh: mesh axis → devices along it.
        topology: the slices.
        dcn: mesh axis → slices along it; None puts slices on the axes that communicate least.
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
    return Links(rings, inside, slices, topology.chip.ici_bytes_per_second, topology.chip.dcn_share)


@dataclass(slots=True)
class _Dimension:
    size: int
    wraps: bool
    pair: bool = False


def _take(left: list[_Dimension], size: int) -> float:
    """Take `size` devices out of the remaining dimensions. Returns their bandwidth in rings."""
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
    """One ring per closed dimension, half per line. Two lines make a grid, whose edge is a ring."""
    outer = [one for one in dimensions if not one.pair]
    if not outer:
        return PAIR
    rings = sum(1.0 if one.wraps else LINE for one in outer)
    return max(rings, 1.0) if len(outer) > 1 else rings
