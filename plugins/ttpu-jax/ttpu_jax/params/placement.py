"""Where arrays live. In: a mesh and a strategy; out: the sharding of each parameter and the constraints on
activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.parallelism import Parallelism, check_devices, resolve_parallelism
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES, Strategy
from ttpu_core.spec import Parameter
from ttpu_core.spec import axes as logical
from ttpu_jax.params.mesh import arrange


@dataclass(frozen=True)
class Placement:
    """A mesh of devices (None: one device) and the strategy that shards arrays along it. Hashable: a static
    argument."""

    mesh: Mesh | None = None
    strategy: Strategy = DEFAULT_STRATEGY

    @property
    def platform(self) -> str:
        """cpu, tpu or gpu: that of the mesh's devices, else of the default device."""
        return self.devices[0].platform

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The mesh's devices in its order, else the default device."""
        return (jax.local_devices()[0],) if self.mesh is None else tuple(self.mesh.devices.flat)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> Sharding:
        """The sharding of an array by its logical axes.

        Raises:
            UnsupportedError: a dimension that the mesh does not divide.
        """
        if self.mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])  # of several processes each has its own
        return NamedSharding(self.mesh, self._spec(axes, shape, name))

    def whole(self) -> Sharding:
        """The sharding of an array that is whole on every device."""
        return self.sharding((), (), "")

    def parameter(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of one parameter."""
        return self.sharding(parameter.axes, parameter.shape, path)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Tell the compiler how an activation is sharded, where there is a mesh."""
        if self.mesh is None:
            return x
        spec = self._spec(self.divisible(axes, x.shape), x.shape, "an activation")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def constrain_looked_up(self, x: jax.Array) -> jax.Array:
        """Tell the compiler how rows of a table [batch, seq, hidden] are sharded, whose features are sharded over some
        of the devices that share the batch: over features first, so that the devices exchange rows and not the table.
        Where they share nothing else, the compiler does that by itself."""
        features, batch = self.mesh_axes(logical.EMBED, x.shape[-1]), self.mesh_axes(logical.BATCH, x.shape[0])
        rest = tuple(axis for axis in batch if axis not in features)
        if self.mesh is None or not features or not rest:
            return x
        sequence = tuple(axis for axis in self.mesh_axes(logical.SEQUENCE, x.shape[1]) if axis not in features)
        spec = PartitionSpec(rest or None, sequence or None, features)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def divisible(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """The axes, without those of dimensions that the mesh does not divide: an activation may stay whole."""
        if self.mesh is None:
            return axes
        table, mesh = dict(self.strategy.rules), dict(self.mesh.shape)
        devices = [prod(mesh.get(a, 1) for a in table.get(axis or "", ())) for axis in axes]
        return tuple(
            axis if size % count == 0 else None for axis, size, count in zip(axes, shape, devices, strict=True)
        )

    def axes_of(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that shard this logical axis, where its size allows it."""
        if self.mesh is None:
            return ()
        return tuple(a for a in dict(self.strategy.rules).get(axis, ()) if self.mesh.shape.get(a, 1) > 1)

    def mesh_axes(self, axis: str, size: int) -> tuple[str, ...]:
        """The mesh axes that shard a dimension of this logical axis; none where it does not divide."""
        if self.mesh is None or self.divisible((axis,), (size,)) == (None,):
            return ()
        return self.strategy.mesh_axes((axis,), (size,), dict(self.mesh.shape), "an activation")[0]

    def _spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> PartitionSpec:
        assert self.mesh is not None
        by_dimension = self.strategy.mesh_axes(axes, shape, dict(self.mesh.shape), name)
        return PartitionSpec(*(a[0] if len(a) == 1 else (a or None) for a in by_dimension))


def local_placement(
    mesh: str | Parallelism | Mesh | None = None, strategy: Strategy = DEFAULT_STRATEGY
) -> Placement:
    """A placement on the devices that this process sees.

    The explicit axes of `jax.make_mesh` become automatic ones: the decoder leaves it to the compiler to follow the
    parameters' shardings.

    Args:
        mesh: what `resolve_parallelism` reads, such as "fsdp" or "data=2,tensor=4", or what it gives; a jax Mesh; or
            None for one device.
        strategy: what is sharded along which axes; a `Parallelism` has its own.

    Raises:
        RequestError: `mesh` is something else.
        UnsupportedError: the mesh needs more devices than there are, or an axis that strategies do not know.
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
        placed = arrange(devices[: mesh.num_devices], sizes, dict(mesh.dcn))
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


def _refuse_part_of_several(needed: int, there: int, name: str) -> None:
    """Of several processes each must have its part in the mesh, or it has nothing to run."""
    if jax.process_count() > 1 and needed != there:
        raise UnsupportedError(
            f"the mesh {name} needs {needed} devices, but {jax.process_count()} processes have {there} together, and "
            f"all of them must be in it: use {there} devices, or no mesh, with which each process runs alone."
        )
