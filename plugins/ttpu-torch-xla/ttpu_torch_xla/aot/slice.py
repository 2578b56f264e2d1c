"""A runtime for a TPU slice that this machine does not have. Its tensors have shapes and no values; operations on them
are recorded for the compiler. Nothing runs, and parameters take no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import Topology, parse_topology
from ttpu_torch_xla.bridge import abstract_mesh, call_jax, lowering_for
from ttpu_torch_xla.runtime import Counters, PartitionSpec
from ttpu_torch_xla.xla.graph import argument_of, placeholder, replace_value
from ttpu_torch_xla.xla.runtime import TorchXla


@dataclass(frozen=True)
class SliceMesh:
    """A mesh of a slice: mesh axis → devices along it, in order."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def num_devices(self) -> int:
        """The number of devices of all axes."""
        return prod(size for _, size in self.sizes)


@dataclass(frozen=True)
class State:
    """Tensors that a step updates, with the arguments of the program that they were before it."""

    tensors: tuple[torch.Tensor, ...]
    arguments: tuple[int, ...]


class TpuSlice(TorchXla):
    """The runtime for the devices of a slice such as "v5e:2x4", whatever this machine has.

    Its tensors are torch_xla's: operations on them are recorded and never run. What has no values, on torch's "meta"
    device, gets none here either.
    """

    name = "aot"

    def __init__(self, topology: str) -> None:
        super().__init__()
        self.topology: Topology = parse_topology(topology)
        self.partition_specs: dict[int, tuple[SliceMesh, PartitionSpec]] = {}
        self.mesh_used: SliceMesh | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which recorded kernels are lowered for this slice."""
        with lowering_for(self.topology.name):
            yield

    def platform(self) -> str:
        """The platform, always tpu."""
        return "tpu"

    def num_devices(self) -> int:
        """Return the number of devices of the slice, as programs see them."""
        return self.topology.num_devices

    def chip(self) -> str | None:
        """The TPU generation of the slice."""
        return self.topology.chip.name

    def num_slices(self) -> int:
        """Return one, or the number of joined slices, for which this module compiles nothing."""
        return self.topology.slices

    def is_spmd(self) -> bool:
        """Always true: a slice's programs run on all of its devices."""
        return True

    def use_spmd(self) -> None:
        """Do nothing: shardings are recorded here and passed to the compiler at the end."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor of any shape to the device; the result has the same shape, and no values where the tensor has
        none."""
        if not tensor.is_meta:
            return tensor.to(self.device())
        return self.placeholder(tuple(tensor.shape), tensor.dtype)

    def placeholder(
        self, shape: tuple[int, ...], dtype: torch.dtype, partition_spec: PartitionSpec = ()
    ) -> torch.Tensor:
        """Make an argument of the program, a tensor of any shape without values; () shards none of its dimensions."""
        self.device()
        tensor = placeholder(shape, dtype)
        whole = (None,) * len(shape)
        self.partition_specs[argument_of(tensor)] = (self.mesh_used or SliceMesh(()), partition_spec or whole)
        return tensor

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> SliceMesh:
        """A mesh of all devices of the slice.

        Raises:
            UnsupportedError: sizes of another number of devices, or several slices.
        """
        mesh = SliceMesh(tuple(sizes.items()))
        if mesh.num_devices != self.num_devices() or (dcn and prod(dcn.values()) > 1):
            raise UnsupportedError(
                f"a mesh of {', '.join(f'{axis}={size}' for axis, size in sizes.items())} was asked for, but "
                f"{self.topology.name!r} is one slice of {self.num_devices()} devices: give sizes whose product that "
                "is, and no dcn axes."
            )
        self.mesh_used = mesh
        return mesh

    def shard(self, tensor: torch.Tensor, mesh: SliceMesh, partition_spec: PartitionSpec) -> None:
        """Shard a tensor of any shape along mesh axes: record the sharding of an argument, or constrain an intermediate
        result."""
        if (argument := argument_of(tensor)) in self.partition_specs:
            self.partition_specs[argument] = (mesh, partition_spec)
            return
        shape = abstract_mesh(dict(mesh.sizes))
        static = {"mesh": shape, "partition_spec": _entries(partition_spec)}
        held = call_jax(_constrained, tensor.detach(), static=static, mesh=shape, name="shard")
        replace_value(tensor, held)

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """Return how an argument, a tensor of any shape, is sharded, as XLA writes it; empty where it is not."""
        found = self.partition_specs.get(argument_of(tensor))
        return "" if found is None else sharding_text(*found)

    def state(self, tensors: list[torch.Tensor]) -> State:
        """Remember arguments before a step updates them in place."""
        return State(tuple(tensors), tuple(argument_of(tensor) for tensor in tensors))

    def sync(self, wait: bool = False) -> None:
        """Do nothing, because nothing runs."""

    def counters(self) -> Counters:
        """Return zeros, because nothing runs."""
        return Counters()

    def reset_counters(self) -> None:
        """Do nothing, because nothing is counted."""


def sharding_text(mesh: SliceMesh, partition_spec: PartitionSpec) -> str:
    """XLA's notation: a tile of devices for each dimension, then those that hold the same."""
    import numpy as np

    names, sizes = [axis for axis, _ in mesh.sizes], dict(mesh.sizes)
    entries = [(one,) if isinstance(one, str) else tuple(one or ()) for one in partition_spec]
    used = [axis for entry in entries for axis in entry]
    if prod(sizes[axis] for axis in used) == 1:
        return "{replicated}"
    rest = [axis for axis in names if axis not in used]
    devices = np.arange(mesh.num_devices).reshape(tuple(sizes.values()))
    order = devices.transpose([names.index(axis) for axis in (*used, *rest)]).reshape(-1)
    tiles = [prod(sizes[axis] for axis in entry) for entry in entries]
    copies = prod(sizes[axis] for axis in rest)
    tail = " last_tile_dim_replicate" if copies > 1 else ""
    shape = ",".join(map(str, [*tiles, copies] if copies > 1 else tiles))
    return f"{{devices=[{shape}]{','.join(map(str, order))}{tail}}}"


def _entries(partition_spec: PartitionSpec) -> tuple[Any, ...]:
    return tuple((one,) if isinstance(one, str) else tuple(one or ()) or None for one in partition_spec)


def _constrained(x: Any, *, mesh: Any, partition_spec: tuple[Any, ...]) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*partition_spec)))
