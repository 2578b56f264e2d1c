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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

FETCH_BEGIN, FETCH_END = "fetch_begin", "fetch_end"
"""Names of the kernels that begin copies, and that wait for them."""
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
        end = jax.shard_map(
            _end, mesh=self.mesh, in_specs=(self.partitions, _WHOLE), out_specs=self.partitions, check_vma=False
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
        picked = jax.lax.switch(turn, [partial(_picked, arrays, number) for number in range(len(arrays[0][0]))])
        return tuple(Copies(group, None, mesh, parts) for group, parts in zip(picked, partitions, strict=True))
    begin = jax.shard_map(
        _begin,
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


Groups = tuple[tuple[tuple[jax.Array, ...], ...], ...]
"""Of each group, of each of its choices, an array of each turn."""


def _picked(groups: Groups, turn: int) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(tuple(choices[turn] for choices in group) for group in groups)


def _begin(turn: jax.Array, groups: Groups) -> tuple[tuple[tuple[jax.Array, ...], ...], tuple[jax.Array, ...]]:
    """On one device: buffers of each group, and the semaphore that its copies signal."""
    flat, structure = jax.tree.flatten(_picked(groups, 0))
    sizes = [len(group) for group in groups]
    turns = len(groups[0][0])
    # In HBM: XLA would copy some of what a kernel reads to VMEM, for all turns.
    sources = [
        pltpu.with_memory_space_constraint(array, pltpu.HBM)
        for number in range(turns)
        for array in jax.tree.leaves(_picked(groups, number))
    ]

    found = pl.pallas_call(
        partial(start_copies, turns=turns, groups=tuple(sizes)),
        name=FETCH_BEGIN,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in sources)],
        out_specs=(
            *(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in flat),
            *(pl.BlockSpec(memory_space=pltpu.SEMAPHORE) for _ in sizes),
        ),
        out_shape=(
            *(pltpu.VMEM(array.shape, array.dtype) for array in flat),
            *(pltpu.SemaphoreType.DMA(()) for _ in sizes),
        ),
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=sum(array.nbytes for array in flat), transcendentals=0
        ),
    )(turn.reshape(1), *sources)
    return jax.tree.unflatten(structure, found[: len(flat)]), tuple(found[len(flat) :])


def _end(buffers: tuple[jax.Array, ...], semaphore: jax.Array) -> tuple[jax.Array, ...]:
    """On one device: the buffers, when all copies that signal the semaphore have ended."""

    whole = [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in buffers]
    arrived = pl.pallas_call(
        wait_for_copies,
        name=FETCH_END,
        in_specs=[*whole, pl.BlockSpec(memory_space=pltpu.SEMAPHORE)],
        out_specs=tuple(whole),
        out_shape=tuple(pltpu.VMEM(buffer.shape, buffer.dtype) for buffer in buffers),
        input_output_aliases={place: place for place in range(len(buffers))},
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=0, transcendentals=0),
    )(*buffers, semaphore)
    return tuple(arrived)


def start_copies(turn: Any, *refs: Any, turns: int, groups: tuple[int, ...]) -> None:
    """Of a turn, begin to copy each array to its buffer. A kernel.

    Args:
        turn: int32 [1].
        refs: for each turn, its arrays, those of one group after those of another; the buffers; the groups' semaphores.
        turns: their number.
        groups: the number of arrays of each.
    """
    arrays = sum(groups)
    buffers, semaphores = refs[turns * arrays :][:arrays], refs[(turns + 1) * arrays :]
    signalled = [semaphore for semaphore, count in zip(semaphores, groups, strict=True) for _ in range(count)]
    for number in range(turns):

        @pl.when(turn[0] == number)
        def start(number: int = number) -> None:
            sources = refs[number * arrays :][:arrays]
            for source, buffer, semaphore in zip(sources, buffers, signalled, strict=True):
                pltpu.make_async_copy(source, buffer, semaphore).start()


def wait_for_copies(*refs: Any) -> None:
    """Wait until all copies to the buffers of a group have ended. A kernel.

    Args:
        refs: the buffers, the semaphore that copies to them signal, and the buffers again, as results.
    """
    count = len(refs) // 2
    for buffer in refs[:count]:
        pltpu.make_async_copy(buffer, buffer, refs[count]).wait()
