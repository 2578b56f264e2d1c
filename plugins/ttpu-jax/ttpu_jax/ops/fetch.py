"""Copies of a layer's arrays from HBM to VMEM which go on while the core computes: a kernel begins them and another one
waits for their end. In a loop over layers XLA:TPU makes no such copies of what a turn reads, and each product of a ring
would read the layer's kernel from HBM anew.

The arrays are those of all layers as they are: the kernel picks the turn's by its number, so that nothing is stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ttpu_jax.ops.fetched import of_turn

_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Choices:
    """An array of each turn of a loop, all of one shape [...], dtype and partition over the devices of a mesh."""

    arrays: tuple[jax.Array, ...]
    partition: PartitionSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copies:
    """Arrays on their way to VMEM.

    Attributes:
        arrays: one [...] for each of the `Choices` that they are of. Not to be read before they have arrived.
        semaphore: what the copies signal; None where nothing is copied, because the devices are no TPUs.
        mesh: all devices. Static.
        partitions: of the arrays. Static.
    """

    arrays: tuple[jax.Array, ...]
    semaphore: jax.Array | None
    mesh: Mesh = field(metadata={"static": True})
    partitions: tuple[PartitionSpec, ...] = field(metadata={"static": True})

    def after(self, value: Any) -> tuple[jax.Array, ...]:
        """The arrays, arrived. The core waits for them when `value`, a pytree of arrays, is there, and not before."""
        arrays, _ = jax.lax.optimization_barrier((self.arrays, value))
        if self.semaphore is None:
            return arrays
        from ttpu_jax.ops.fetch_tpu import end as on_device

        end = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(self.partitions, _WHOLE), out_specs=self.partitions, check_vma=False
        )
        arrived: tuple[jax.Array, ...] = end(arrays, self.semaphore)
        return arrived


def copies(turn: jax.Array, groups: Sequence[Sequence[Choices]], mesh: Mesh, platform: str) -> tuple[Copies, ...]:
    """Begin to copy a turn's arrays to VMEM, each group's before the next one's.

    Args:
        turn: int32 scalar, the number of the array to copy of each of the `Choices`.
        groups: of which one waits for all arrays at once.
        mesh: all devices, of one platform.
        platform: of the devices; on others than TPUs the arrays are only picked.
    """
    arrays = tuple(tuple(each.arrays for each in group) for group in groups)
    partitions = tuple(tuple(each.partition for each in group) for group in groups)
    if platform != "tpu":
        picked = jax.lax.switch(turn, [partial(of_turn, arrays, number) for number in range(len(arrays[0][0]))])
        return tuple(Copies(group, None, mesh, parts) for group, parts in zip(picked, partitions, strict=True))
    from ttpu_jax.ops.fetch_tpu import begin as on_device

    begin = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(_WHOLE, partitions),
        out_specs=(partitions, tuple(_WHOLE for _ in groups)),
        check_vma=False,
    )
    begun, semaphores = begin(turn, arrays)
    return tuple(
        Copies(group, semaphore, mesh, parts)
        for group, semaphore, parts in zip(begun, semaphores, partitions, strict=True)
    )
