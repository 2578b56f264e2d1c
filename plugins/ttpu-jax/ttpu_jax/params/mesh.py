"""Arranges devices in the shape of a mesh, so that neighbours along the last axes are neighbours on the
interconnect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.experimental import mesh_utils

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import chip_of_device_kind
from ttpu_core.sharding.links import slice_axes
from ttpu_core.sharding.rings import arranged


def arrange(
    devices: Sequence[jax.Device], sizes: Mapping[str, int], slices: Mapping[str, int], *, by_links: bool = True
) -> np.ndarray:
    """The devices as an array [*sizes.values()]: one dimension per mesh axis.

    Args:
        devices: as many devices as the product of `sizes`.
        sizes: mesh axis → devices along it.
        slices: mesh axis → slices along it; along other axes all devices belong to one slice. Empty: `slice_axes`
            chooses. Devices without slices, such as virtual ones on a CPU, are divided into equal slices in their
            order.
        by_links: neighbours on the last axes are neighbours on the interconnect; else devices keep their order.

    Raises:
        UnsupportedError: the devices belong to another number of slices.
    """
    there = number_of_slices(devices)
    if there > 1 and not slices:
        slices = slice_axes(sizes, there)
    outer = [slices.get(axis, 1) for axis in sizes]
    inner = [size // count for size, count in zip(sizes.values(), outer, strict=True)]
    if prod(outer) == 1:
        return _within_slice(devices, inner, by_links)
    blocks = np.stack([_within_slice(group, inner, by_links) for group in _by_slice(devices, prod(outer))])
    rank = len(inner)
    pairs = [place for axis in range(rank) for place in (axis, rank + axis)]
    return blocks.reshape(*outer, *inner).transpose(pairs).reshape(tuple(sizes.values()))


def number_of_slices(devices: Sequence[jax.Device]) -> int:
    """Number of slices that the devices belong to; 1 for devices without slices."""
    return len({_slice_of(device) for device in devices})


def _by_slice(devices: Sequence[jax.Device], count: int) -> list[list[jax.Device]]:
    groups: defaultdict[int, list[jax.Device]] = defaultdict(list)
    knows_slices = devices[0].platform == "tpu"
    for place, device in enumerate(devices):
        groups[_slice_of(device) if knows_slices else place * count // len(devices)].append(device)
    if len(groups) != count or len({len(group) for group in groups.values()}) != 1:
        raise UnsupportedError(
            f"a mesh over {count} slices was asked for, but the {len(devices)} devices are in {len(groups)}: write the "
            "number of slices after 'dcn.', or leave that out for one slice."
        )
    return [groups[index] for index in sorted(groups)]


def _slice_of(device: jax.Device) -> int:
    number: int = getattr(device, "slice_index", None) or 0
    return number if device.platform == "tpu" else 0


def _within_slice(devices: Sequence[jax.Device], shape: Sequence[int], by_links: bool) -> np.ndarray:
    if not by_links:
        return np.asarray(devices).reshape(tuple(shape))
    chip = chip_of_device_kind(devices[0].device_kind)
    if chip is not None and chip.dimensions == 2:
        # `mesh_utils` passes the dimensions of an axis one after another, so that every second step crosses several
        # links, and its own order for v5e:2x4 scatters the rows of a mesh of 2 x 4.
        found = arranged([tuple(device.coords) for device in devices], shape, chip)
        if found is not None:
            return np.asarray(devices, object)[found]
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:  # an axis is not a product of whole interconnect dimensions
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, ValueError):  # a part of a slice with gaps: no order is better than another
        return np.asarray(devices).reshape(tuple(shape))
