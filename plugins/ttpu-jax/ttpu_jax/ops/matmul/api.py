"""The product of activations with a quantized kernel, by the implementation that suits its format."""

from __future__ import annotations

from typing import Any

import jax

from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.ops.matmul import xla
from ttpu_jax.ops.matmul.dense import Product


def quantized_matmul(
    x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None = None, *, out_dtype: Any = None
) -> jax.Array:
    """x [..., in] times a quantized kernel [*out, in], plus bias [*out]: [..., *out] in `out_dtype` (default: x's).

    Sums are float32, or int32 where both operands are int8; rounding to `out_dtype` comes last. If the kernel's format
    quantizes activations, x is rounded to it first. Differentiable in x; rounding x counts as the identity
    (straight-through, arXiv 1308.3432).
    """
    return quantized_product(x, kernel, bias, Product(out_dtype or x.dtype))


def quantized_product(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product) -> jax.Array:
    """`quantized_matmul`, computed as `how` says."""
    return xla.product(x, kernel, bias, how)
