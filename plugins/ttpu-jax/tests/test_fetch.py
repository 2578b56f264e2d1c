"""Kernels that copy a turn's arrays to VMEM, in one kernel: as two they run on TPUs alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttpu_jax.ops.fetch import Choices, copies
from ttpu_jax.ops.fetch_tpu import start_copies, wait_for_copies

TURNS, GROUPS = 3, (2, 1)
SHAPES = ((8, 128), (2, 8, 128), (16, 128))
"""Of the arrays of a turn."""


def arrays(turn: int) -> list[np.ndarray]:
    random = np.random.default_rng(turn)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("turn", range(TURNS))
def test_each_group_arrives_before_the_end_of_its_wait(turn: int) -> None:
    """The interpreter copies when a kernel waits, and not before."""

    def kernel(turn: Any, *refs: Any) -> None:
        sources, results, rest = refs[: TURNS * 3], refs[TURNS * 3 :][:3], refs[TURNS * 3 + 3 :]
        buffers, semaphores = rest[:3], rest[3:]
        start_copies(turn, *sources, *buffers, *semaphores, turns=TURNS, groups=GROUPS)
        for group, semaphore in ((buffers[:2], semaphores[0]), (buffers[2:], semaphores[1])):
            wait_for_copies(*group, semaphore, *group)
            for buffer, result in zip(buffers, results, strict=True):
                if any(buffer is one for one in group):
                    result[...] = buffer[...]

    everything = [array for number in range(TURNS) for array in arrays(number)]
    found = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *(pl.BlockSpec(memory_space=pl.ANY) for _ in everything)],
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES),
        scratch_shapes=[*(pltpu.VMEM(shape, jnp.float32) for shape in SHAPES), *(pltpu.SemaphoreType.DMA(()),) * 2],
        interpret=pltpu.InterpretParams(dma_execution_mode="on_wait"),
    )(jnp.full((1,), turn, jnp.int32), *everything)
    for one, expected in zip(found, arrays(turn), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("turn", range(TURNS))
def test_other_devices_pick_the_turns_arrays(turn: int) -> None:
    mesh, partition = Mesh(np.array(jax.devices()[:2]), ("tensor",)), PartitionSpec("tensor")
    by_array = tuple(zip(*(arrays(number) for number in range(TURNS)), strict=True))
    placed = jax.device_put(by_array, NamedSharding(mesh, partition))

    @jax.jit
    def picked(turn: jax.Array, x: jax.Array, placed: Any) -> list[tuple[jax.Array, ...]]:
        whole = [Choices(each, partition) for each in placed]
        return [group.after(x) for group in copies(turn, (whole[:2], whole[2:]), mesh, "cpu")]

    first, second = picked(jnp.int32(turn), jnp.zeros(3), placed)
    assert (len(first), len(second)) == GROUPS
    for one, expected in zip((*first, *second), arrays(turn), strict=True):
        np.testing.assert_array_equal(one, expected)
