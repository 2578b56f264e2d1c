"""The interconnect of TPUs and the network between slices: how long a collective takes on each, and which mesh axes lie
across slices."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from ttpu_core.sharding.strategy import MESH_AXES

# An assumption, not a measurement: about a microsecond per hop (jax-ml.github.io/scaling-book). A ring that is used in
# both directions needs half as many hops.
HOP_SECONDS = 0.5e-6

DCN_SECONDS = 20e-6
"""Assumed latency of one exchange between slices, whatever its size: none is published."""


def collective_seconds(
    op: str, result_bytes: float, group_size: int, link_bytes_per_second: float, axes: float = 1
) -> float:
    """Time of one collective on a ring that uses both directions of `axes` dimensions of the interconnect.

    With g = group size, the data that one device sends are, as a share of the result: all-gather, every shard but
    its own; reduce-scatter, the same, with one shard as the result; all-reduce, both. In an all-to-all the shares of
    other devices travel a quarter of a ring on average, or of the side of a torus for each of its dimensions. See
    section 3 of the scaling book.

    Args:
        op: the kind of collective.
        result_bytes: bytes of the result on one device.
        group_size: number of devices that take part.
        link_bytes_per_second: bandwidth of one link in one direction.
        axes: number of dimensions of the interconnect that the ring uses.
    """
    if group_size <= 1:
        return 0.0
    others, sides = (group_size - 1) / group_size, max(axes, 1)
    across = sides * group_size ** (1 / sides) / 4
    sent = {
        "all-gather": others,
        "reduce-scatter": group_size - 1.0,
        "all-reduce": 2 * others,
        "all-to-all": across,
        "ragged-all-to-all": across,
    }[op]
    return result_bytes * sent / (2 * link_bytes_per_second * axes) + (group_size - 1) * HOP_SECONDS


def permute_seconds(
    result_bytes: float, link_bytes_per_second: float, hops: int = 1, messages: float | None = None
) -> float:
    """Time in which devices each send their data to another one.

    Args:
        result_bytes: bytes that one device sends.
        link_bytes_per_second: bandwidth of one link in one direction.
        hops: links between a device and the one that it sends to, at most.
        messages: how many devices' data cross the busiest link; None is `hops`, as on a ring on which all send equally
            far.
    """
    crossing = hops if messages is None else messages
    return crossing * result_bytes / link_bytes_per_second + 2 * hops * HOP_SECONDS


def dcn_seconds(op: str, result_bytes: float, slices: int, bytes_per_second: float) -> float:
    """Time in which each device exchanges data with those in its place in other slices, over the data centre network.
    No latency is included (`DCN_SECONDS`).

    A device is taken to send no more than it must: as on a ring, see `collective_seconds`; in an all-to-all, all that
    is for other slices.

    Args:
        op: the kind of collective.
        result_bytes: bytes of the result on one device.
        slices: number of slices that take part.
        bytes_per_second: one device's share of its host's network cards (`Chip.dcn_share`).
    """
    others = (slices - 1) / slices
    sent = {
        "all-gather": others,
        "reduce-scatter": slices - 1.0,
        "all-reduce": 2 * others,
        "all-to-all": others,
        "ragged-all-to-all": others,
        "collective-permute": 1.0,
    }[op]
    return result_bytes * sent / bytes_per_second


def slice_axes(mesh: Mapping[str, int], slices: int) -> dict[str, int]:
    """Distribute slices over the first mesh axes that they divide: `data`, then `fsdp`, ... Empty for one slice."""
    found, left = {}, slices
    for axis in MESH_AXES:
        if (along := gcd(mesh.get(axis, 1), left)) > 1:
            found[axis] = along
            left //= along
    return found
