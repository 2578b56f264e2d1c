"""The Pallas products with quantized kernels, in the interpreter, equal the product with the dequantized kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.ops.kernels import dense, quantize
from ttpu_jax.ops.matmul.pallas_blocks import Blocks, blocks_for
from ttpu_jax.ops.matmul.pallas_weight_only import weight_only_product

CASES = {
    "groups share a span, rows in two blocks": (KernelFormat("int4", 32), (2, 40, 256), (2, 36)),
    "zero points, several blocks of inputs": (KernelFormat("int4", 128, symmetric=False), (3, 8192), (40,)),
    "a group is several spans": (KernelFormat("int8", 512, symmetric=False), (2, 1024), (40,)),
    "a scale per channel": (KernelFormat("int8", symmetric=False), (1, 8192), (8,)),
    "fewer inputs than a register": (KernelFormat("int4", 32), (4, 96), (40,)),
    "float8": (KernelFormat("float8_e4m3fn", 128, scale_dtype="bfloat16"), (5, 256), (8,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_product_equals_that_with_the_dequantized_kernel(case: str) -> None:
    form, shape, out = CASES[case]
    rng = np.random.default_rng(0)
    kernel = quantize(jnp.asarray(rng.normal(size=(*out, shape[-1])), jnp.float32), form)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    found = weight_only_product(x, kernel, jnp.float32, kind="cpu", interpret=True)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(dense(kernel), np.float64), (-1, -1))
    # Sums of n float32 products in blocks of at least 32: an error of about 2**-24 * sqrt(n) of the largest term.
    np.testing.assert_allclose(np.asarray(found), exact, rtol=0, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("rows", [3, 80], ids=["digits", "many rows"])
def test_bfloat16_activations_are_multiplied_as_finely_as_they_are(rows: int) -> None:
    rng = np.random.default_rng(1)
    kernel = quantize(jnp.asarray(rng.normal(size=(24, 256)), jnp.float32), KernelFormat("int4", 64, symmetric=False))
    x = jnp.asarray(rng.normal(size=(rows, 256)), jnp.bfloat16)
    found = weight_only_product(x, kernel, jnp.float32, kind="cpu", interpret=True)
    weights, wide = np.asarray(dense(kernel), np.float64), np.asarray(x, np.float64)
    exact = wide @ weights.T
    # Few rows are rounded to steps of 1/16256 of the largest activation. Zero points are multiplied by x as it is, so
    # that the rounding counts as often as the value before its zero point is taken off: at most 8 scales.
    stored = 8 * np.repeat(np.asarray(kernel.scale, np.float64), 64, axis=1)
    bound = (np.abs(wide).max(1) / 16256 / 2)[:, None] * stored.sum(1) if rows < 64 else 0
    assert (np.abs(np.asarray(found) - exact) <= bound + 2e-6 * np.abs(exact).max()).all()


def test_blocks_are_whole_groups_and_divide_the_inputs() -> None:
    for inputs in (768, 1792, 2048, 3584, 3840, 4096, 14336, 15360):
        for group in (32, 64, 128, None):
            blocks = blocks_for("TPU v5 lite", 8, 4096, inputs, group, np.int8)
            assert inputs % blocks.inputs == 0 and blocks.inputs % blocks.span == 0
            assert blocks.group == inputs or blocks.inputs % blocks.group == 0
    assert blocks_for("TPU v5 lite", 8, 40, 96, 32, np.int8) == Blocks(8, 40, 96, 96, 32, digits=True)
    with pytest.raises(NotImplementedError, match="not whole registers"):
        blocks_for("TPU v5 lite", 8, 40, 100 * 24, 24, np.int8)
    with pytest.raises(NotImplementedError, match="cannot read float4 on a TPU v5 lite"):
        blocks_for("TPU v5 lite", 8, 40, 128, 32, jnp.float4_e2m1fn)
    assert blocks_for("TPU7x", 8, 40, 128, 32, jnp.float4_e2m1fn).digits is False
