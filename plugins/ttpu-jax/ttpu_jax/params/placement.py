"""Where arrays live. In: a mesh and a strategy; out: the sharding of each parameter and the constraints on
activations."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.plan.strategy import DEFAULT_STRATEGY, MESH_AXES, Strategy, parse_mesh
from ttpu_core.spec import Parameter


@dataclass(frozen=True)
class Placement:
    """A mesh of devices (None: one device) and the strategy that cuts arrays along it. Hashable: a static argument."""

    mesh: Mesh | None = None
    strategy: Strategy = DEFAULT_STRATEGY

    @property
    def platform(self) -> str:
        """cpu, tpu or gpu: that of the mesh's devices, else of the default device."""
        return jax.devices()[0].platform if self.mesh is None else self.mesh.devices.flat[0].platform

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> Sharding:
        """The sharding of an array by its logical axes.

        Raises:
            UnsupportedError: a dimension that the mesh does not divide.
        """
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, self._spec(axes, shape, name))

    def parameter(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of one parameter."""
        return self.sharding(parameter.axes, parameter.shape, path)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Tell the compiler how an activation is cut, where there is a mesh."""
        if self.mesh is None:
            return x
        logical = self.divisible(axes, x.shape)
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, self._spec(logical, x.shape, "an activation"))
        )

    def divisible(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """The axes, without those of dimensions that are too small to be cut: an activation may stay whole."""
        if self.mesh is None:
            return axes
        table, mesh = dict(self.strategy.rules), dict(self.mesh.shape)
        devices = [prod(mesh.get(a, 1) for a in table.get(axis or "", ())) for axis in axes]
        return tuple(
            axis if size % count == 0 else None for axis, size, count in zip(axes, shape, devices, strict=True)
        )

    def cut(self, axis: str, size: int) -> tuple[str, ...]:
        """The mesh axes that cut a dimension of this logical axis; none where it does not divide."""
        if self.mesh is None or self.divisible((axis,), (size,)) == (None,):
            return ()
        return self.strategy.mesh_axes((axis,), (size,), dict(self.mesh.shape), "an activation")[0]

    def _spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> PartitionSpec:
        assert self.mesh is not None
        cut = self.strategy.mesh_axes(axes, shape, dict(self.mesh.shape), name)
        return PartitionSpec(*(a[0] if len(a) == 1 else (a or None) for a in cut))


def local_placement(mesh: str | Mesh | None = None, strategy: Strategy = DEFAULT_STRATEGY) -> Placement:
    """A placement on this process's devices; `mesh` is written like "tensor=4", or is a jax Mesh; None is one device.

    The explicit axes of `jax.make_mesh` become automatic ones: the decoder leaves it to the compiler to follow the
    parameters' shardings.

    Raises:
        RequestError: `mesh` is something else.
        UnsupportedError: the mesh needs more devices than there are, or an axis that strategies do not know.
    """
    if mesh is None:
        return Placement(None, strategy)
    if isinstance(mesh, str):
        sizes = parse_mesh(mesh)
        needed, devices = prod(sizes.values()), jax.devices()
        if needed > len(devices):
            raise UnsupportedError(
                f"the mesh {mesh!r} needs {needed} devices, but the platform {devices[0].platform!r} has "
                f"{len(devices)} here: make it smaller (on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 "
                "simulates 8 devices)."
            )
        names = [axis for axis in MESH_AXES if axis in sizes]
        return Placement(Mesh(np.array(devices[:needed]).reshape([sizes[n] for n in names]), names), strategy)
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
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    return Placement(Mesh(mesh.devices, mesh.axis_names, axis_types=automatic), strategy)
