"""The product of rows with one of several kernels each, in each of the ways that it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import assert_close

from ttpu_jax.ops.grouped import SummedKernels, grouped_linear
from ttpu_jax.ops.grouped_gradient_tpu import kernel_gradient
from ttpu_jax.ops.grouped_tpu import visits_of

GROUPED = {
    "few": (40, 24, 16, [5, 0, 11, 3]),
    "many_in_one_group": (300, 256, 128, [0, 0, 50, 250, 0]),
    "input_not_a_multiple_of_lanes": (300, 256, 96, [100, 0, 0, 7, 130, 13]),
    "several_blocks_of_the_kernel": (64, 384, 4224, [20, 30]),
    "input_smaller_than_output_and_lanes": (64, 96, 32, [20, 30, 0]),
    "a_block_that_the_output_does_not_fill": (40, 1100, 4224, [5, 35]),
    "none": (16, 8, 8, [0, 0]),
    "whole_blocks": (1100, 24, 16, [1, 1000, 0]),
    "no_row_left_for_the_last": (256, 24, 16, [128, 128, 0, 0]),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu-interpreted", "gpu"])
@pytest.mark.parametrize("case", GROUPED)
def test_a_grouped_product_gives_each_row_its_own_kernel(case: str, platform: str) -> None:
    rows, out, inner, sizes = GROUPED[case]
    rng = np.random.default_rng(0)
    x, kernels, gradient = (
        rng.normal(size=shape).astype(np.float32) for shape in ((rows, inner), (len(sizes), out, inner), (rows, out))
    )
    used = sum(sizes)
    x[used:], gradient[used:] = np.nan, np.nan  # what comes after the last group must not matter
    product, back = jax.vjp(lambda x, k: grouped_linear(x, k, jnp.asarray(sizes, jnp.int32), platform), x, kernels)
    to_x, to_kernels = back(jnp.asarray(gradient))
    end = 0
    for group, size in enumerate(sizes):
        start, end = end, end + size
        assert_close(product[start:end], x[start:end] @ kernels[group].T) if size else None
        assert_close(to_x[start:end], gradient[start:end] @ kernels[group]) if size else None
        assert_close(to_kernels[group], gradient[start:end].T @ x[start:end])


def test_sums_of_a_gradient_are_rounded_once() -> None:
    """In bfloat16, with blocks that the features do not fill, for kernels that lie transposed in a TPU's memory too."""
    rng, sizes = np.random.default_rng(1), jnp.asarray([300, 0, 290], jnp.int32)
    for out, inner in ((1100, 256), (1408, 64)):
        x, gradient = (jnp.asarray(rng.normal(size=(600, size)), jnp.bfloat16) for size in (inner, out))
        kernels = jax.ShapeDtypeStruct((3, out, inner), jnp.bfloat16)
        found = kernel_gradient(x, gradient, sizes, kernels, interpret=True)
        before = jnp.asarray(rng.normal(size=kernels.shape) * 50, jnp.bfloat16)
        added = kernel_gradient(x, gradient, sizes, kernels, before, interpret=True)
        assert found.dtype == added.dtype == jnp.bfloat16
        for group, (start, end) in enumerate(((0, 300), (300, 300), (300, 590))):
            rows, gradients = (np.asarray(each, np.float32)[start:end] for each in (x, gradient))
            assert_close(found[group], jnp.asarray(gradients.T @ rows, jnp.bfloat16), 1e-2)
            total = np.asarray(before[group], np.float32) + gradients.T @ rows
            assert_close(added[group], jnp.asarray(total, jnp.bfloat16), 1e-2)


@pytest.mark.parametrize("platform", ["cpu", "tpu-interpreted", "gpu"])
def test_a_gradient_begins_with_that_of_other_rows(platform: str) -> None:
    rng, sizes = np.random.default_rng(2), jnp.asarray([5, 0, 11], jnp.int32)
    x, kernels, sums, gradient = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((16, 8), (3, 2, 6, 8), (3, 2, 6, 8), (16, 12))
    )

    def gradients(kernels: jax.Array, *sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        def product(x: jax.Array, kernels: jax.Array) -> jax.Array:
            return grouped_linear(x, SummedKernels(kernels, *sums) if sums else kernels, sizes, platform)

        return jax.vjp(product, x, kernels)[1](gradient)

    (to_x, to_kernels), (same, own) = gradients(kernels, sums), gradients(kernels)
    assert_close(to_x, same)
    assert_close(to_kernels, own + sums)


def test_a_group_without_rows_is_visited_within_the_rows() -> None:
    group, tile, *_, visits = visits_of(jnp.asarray([128, 0, 128, 0, 0], jnp.int32), 256, 128, every=True)
    assert group[: int(visits)].tolist() == [0, 1, 2, 3, 4] and tile[: int(visits)].tolist() == [0, 1, 1, 1, 1]
    assert visits_of(jnp.asarray([128, 0, 128, 0, 0], jnp.int32), 256, 128)[-1] == 2


def test_a_cpu_does_not_convert_kernels_that_no_row_needs() -> None:
    x, kernels = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 96, 64), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(grouped_linear, static_argnums=3).lower(x, kernels, sizes, "cpu").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 96 * 64 * 2 / 4
