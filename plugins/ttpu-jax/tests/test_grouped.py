"""The product of rows with one of several kernels each, in each of the ways that it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import assert_close

from ttpu_jax.ops.grouped import grouped_linear

GROUPED = {
    "few": (40, 24, 16, [5, 0, 11, 3]),
    "many_in_one_group": (300, 256, 128, [0, 0, 50, 250, 0]),
    "input_not_a_multiple_of_lanes": (300, 256, 96, [100, 0, 0, 7, 130, 13]),
    "several_blocks_of_the_kernel": (64, 384, 4224, [20, 30]),
    "input_smaller_than_output_and_lanes": (64, 96, 32, [20, 30, 0]),
    "a_block_that_the_output_does_not_fill": (40, 1100, 4224, [5, 35]),
    "none": (16, 8, 8, [0, 0]),
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


def test_a_cpu_does_not_convert_kernels_that_no_row_needs() -> None:
    x, kernels = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 96, 64), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(grouped_linear, static_argnums=3).lower(x, kernels, sizes, "cpu").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 96 * 64 * 2 / 4
