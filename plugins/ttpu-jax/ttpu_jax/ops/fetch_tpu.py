"""The kernels of `ttpu_jax.ops.fetch`, for one device. Apart from it, because a CPU never needs Pallas, whose import
takes a third of a second."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.fetched import FETCH_BEGIN, FETCH_END, Groups, of_turn


def begin(turn: jax.Array, groups: Groups) -> tuple[tuple[tuple[jax.Array, ...], ...], tuple[jax.Array, ...]]:
    """Begin to copy a turn's arrays to VMEM.

    Args:
        turn: int32 scalar.
        groups: arrays of all turns.

    Returns:
        A buffer [...] for each array of a turn, by group, and the semaphore that the copies of each group signal.
    """
    flat, structure = jax.tree.flatten(of_turn(groups, 0))
    sizes = [len(group) for group in groups]
    turns = len(groups[0][0])
    # In HBM: XLA would copy some of what a kernel reads to VMEM, for all turns.
    sources = [
        pltpu.with_memory_space_constraint(array, pltpu.HBM)
        for number in range(turns)
        for array in jax.tree.leaves(of_turn(groups, number))
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


def end(buffers: tuple[jax.Array, ...], semaphore: jax.Array) -> tuple[jax.Array, ...]:
    """The `buffers`, [...] each, when all copies that signal the `semaphore`, an int32 scalar, have ended."""
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
