"""A `Placement` assigns arrays to devices: the sharding of each parameter, and sharding constraints on activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.hardware import Chip, chip_of_device_kind
from ttpu_core.sharding.parallelism import Parallelism, check_devices, resolve_parallelism
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES, Strategy
from ttpu_core.spec import Parameter
from ttpu_core.spec import axes as logical
from ttpu_core.spec.arithmetic import BITS
from ttpu_jax.params.mesh import arrange


@dataclass(frozen=True)
class Placement:
    """A mesh of devices (None: one device) and the strategy that shards arrays along it. Hashable, for use as a
    static argument."""

    mesh: Mesh | None = None
    strategy: Strategy = DEFAULT_STRATEGY

    @property
    def platform(self) -> str:
        """cpu, tpu or gpu: the platform of the mesh's devices, else of the default device."""
        return self.devices[0].platform

    @property
    def chip(self) -> Chip | None:
        """The TPU generation of the devices; None for other devices, and for TPUs that are not known."""
        return chip_of_device_kind(self.devices[0].device_kind)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The mesh's devices in its order, else the default device."""
        return (jax.local_devices()[0],) if self.mesh is None else tuple(self.mesh.devices.flat)

    @property
    def axes_across_slices(self) -> frozenset[str]:
        """The mesh axes along which devices belong to several slices."""
        if self.mesh is None:
            return frozenset()
        slices = np.vectorize(lambda device: getattr(device, "slice_index", 0))(self.mesh.devices)
        names = enumerate(self.mesh.axis_names)
        return frozenset(name for place, name in names if (slices != np.take(slices, [0], place)).any())

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> Sharding:
        """The sharding of an array by its logical axes.

        Raises:
            UnsupportedError: the mesh does not divide a dimension.
        """
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])  # each process uses its own device
        return NamedSharding(self.mesh, self._spec(axes, shape, name))

    def whole(self) -> Sharding:
        """The sharding of an array that is replicated on every device."""
        return self.sharding((), (), "")

    def read_by_host(self) -> Sharding | None:
        """The sharding of an array that the host reads: None leaves it to the compiler, unless a part of the array
        would be out of this process's reach."""
        return self.whole() if jax.process_count() > 1 else None

    def array_axes(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str
    ) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that shard each dimension of an array by its logical axes; () for a dimension that is whole.

        Raises:
            UnsupportedError: the mesh does not divide a dimension.
        """
        if self.mesh is None:
            return ((),) * len(shape)
        return self.strategy.mesh_axes(axes, shape, dict(self.mesh.shape), name)

    def parameter(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of one parameter."""
        return self.sharding(parameter.axes, parameter.shape, path)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain the sharding of an activation `x`: [...] by its logical axes. The result has the same shape.
        Without a mesh, x is returned unchanged."""
        if self.mesh is None:
            return x
        partition = self._spec(self.divisible(axes, x.shape), x.shape, "an activation")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition))

    def constrain_looked_up(self, x: jax.Array, features: tuple[str, ...]) -> jax.Array:
        """Constrain the sharding of embedding rows `x`: [batch, seq, hidden] if mesh axes shard the table's `features`.
        Features are sharded first, so that devices exchange rows instead of the table, and gradients of rows instead of
        the table's. The result has the same shape."""
        batch = self.mesh_axes(logical.BATCH, x.shape[0])
        rest = tuple(axis for axis in batch if axis not in features)
        if self.mesh is None or not features:
            return x
        sequence = tuple(axis for axis in self.mesh_axes(logical.SEQUENCE, x.shape[1]) if axis not in features)
        partition = PartitionSpec(rest or None, sequence or None, features)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition))

    def divisible(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """The logical axes, with None for dimensions that the mesh does not divide: these stay whole."""
        if self.mesh is None:
            return axes
        table, mesh = dict(self.strategy.rules), dict(self.mesh.shape)
        devices = [prod(mesh.get(a, 1) for a in table.get(axis or "", ())) for axis in axes]
        return tuple(
            axis if size % count == 0 else None for axis, size, count in zip(axes, shape, devices, strict=True)
        )

    def axes_of(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that shard this logical axis, if its size allows it."""
        if self.mesh is None:
            return ()
        return tuple(a for a in dict(self.strategy.rules).get(axis, ()) if self.mesh.shape.get(a, 1) > 1)

    def mesh_axes(self, axis: str, size: int) -> tuple[str, ...]:
        """The mesh axes that shard a dimension of this logical axis and size. Empty if they do not divide it."""
        if self.mesh is None or self.divisible((axis,), (size,)) == (None,):
            return ()
        return self.strategy.mesh_axes((axis,), (size,), dict(self.mesh.shape), "an activation")[0]

    def part(self, axis: str, size: int) -> int:
        """The length of a device's part of a dimension of this logical axis and size."""
        found = self.mesh_axes(axis, size)
        return size if self.mesh is None else size // prod(self.mesh.shape[one] for one in found)

    def _spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> PartitionSpec:
        by_dimension = self.array_axes(axes, shape, name)
        return PartitionSpec(*(by[0] if len(by) == 1 else (by or None) for by in by_dimension))


def local_placement(
    mesh: str | Parallelism | Mesh | None = None, strategy: Strategy = DEFAULT_STRATEGY, *, by_links: bool = True
) -> Placement:
    """A placement on the devices that this process sees.

    The explicit axes of `jax.make_mesh` become automatic ones: the decoder relies on the compiler to follow the
    parameters' shardings.

    Args:
        mesh: text that `resolve_parallelism` reads, such as "fsdp" or "data=2,tensor=4", or its result; a jax Mesh;
            or None for one device.
        strategy: which mesh axes shard which logical axes; a `Parallelism` has its own strategy.
        by_links: see `ttpu_jax.params.mesh.arrange`.

    Raises:
        RequestError: `mesh` has another type.
        UnsupportedError: the mesh needs more devices than there are, or has an unknown axis.
    """
    if mesh is None:
        return Placement(None, strategy)
    devices = jax.devices()
    if isinstance(mesh, str):
        mesh = replace(resolve_parallelism(mesh, len(devices)), strategy=strategy)
    if isinstance(mesh, Parallelism):
        check_devices(mesh, len(devices), str(mesh))
        _refuse_part_of_several(mesh.num_devices, len(devices), repr(str(mesh)))
        if not mesh.mesh:
            return Placement(None, mesh.strategy)
        sizes = dict(mesh.mesh)
        placed = arrange(devices[: mesh.num_devices], sizes, dict(mesh.dcn), by_links=by_links)
        return Placement(Mesh(placed, tuple(sizes)), mesh.strategy)
    if not isinstance(mesh, Mesh):
        raise RequestError(
            f"mesh is the {type(mesh).__name__} {str(mesh)[:60]!r}, but text such as 'data=2,tensor=4' or a "
            "jax.sharding.Mesh is needed: pass one of those, or None for one device."
        )
    unknown = [axis for axis in mesh.axis_names if axis not in MESH_AXES]
    if unknown:
        raise UnsupportedError(
            f"the mesh has the axes {', '.join(mesh.axis_names)}, but strategies know {', '.join(MESH_AXES)}: rename "
            f"{', '.join(map(str, unknown))}."
        )
    _refuse_part_of_several(mesh.devices.size, jax.device_count(), f"of {mesh.devices.size} devices")
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    return Placement(Mesh(mesh.devices, mesh.axis_names, axis_types=automatic), strategy)


def device_bytes(arrays: Any) -> int:
    """Bytes of a tree of arrays, which may be abstract, on one device, without the padding of tiles."""
    leaves: Iterable[Any] = jax.tree.leaves(arrays)
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * BITS[jnp.dtype(leaf.dtype).name] // 8 for leaf in leaves)


def _refuse_part_of_several(needed: int, there: int, name: str) -> None:
    """Refuse a mesh that leaves out devices of one of several processes, because that process would have nothing to
    run."""
    if jax.process_count() > 1 and needed != there:
        raise UnsupportedError(
            f"the mesh {name} needs {needed} devices, but {jax.process_count()} processes have {there} together, and "
            f"all of them must be in it: use {there} devices, or no mesh, with which each process runs alone."
        )
