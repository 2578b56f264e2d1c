"""The product of activations with a quantized kernel, by the implementation that suits its format and the platform."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import QuantizedKernel, dense
from ttpu_jax.ops.matmul import pallas, xla
from ttpu_jax.ops.matmul.dense import Product


def quantized_matmul(
    x: jax.Array,
    kernel: QuantizedKernel,
    bias: jax.Array | None = None,
    *,
    out_dtype: Any = None,
    platform: str | None = None,
) -> jax.Array:
    """x times a quantized kernel, plus bias, summed in float32, or in int32 where both operands are integers.

    If the kernel's format quantizes activations, x is rounded to it first. Differentiable in x and in the bias: the
    gradient is that of the dequantized kernel, and rounding x counts as the identity (straight-through, arXiv
    1308.3432). The kernel's arrays get none.

    Args:
        x: [..., in], float32 or bfloat16.
        kernel: [*out, in].
        bias: [*out].
        out_dtype: of the result, by default x's; rounding to it comes last.
        platform: cpu, tpu or gpu, where this runs, if that is not JAX's default.

    Returns:
        [..., *out].
    """
    how = Product(out_dtype or x.dtype, platform=platform or jax.default_backend())
    return quantized_product(x, kernel, bias, how)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantized_product(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product) -> jax.Array:
    """`quantized_matmul` of x [..., in] and bias [*out], computed as `how` says. The result is [..., *out]."""
    if how.devices is not None:
        rows = prod(x.shape[:-1])
        if pallas.why_not_pallas(kernel.format, kernel.shape, rows, how.devices) is None:
            return pallas.product(x, kernel, bias, how.out_dtype, how.devices)
    return xla.product(x, kernel, bias, how)


def _with_residuals(
    x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product
) -> tuple[jax.Array, Any]:
    # Empty slices carry the dtypes of what the gradients are of.
    return quantized_product(x, kernel, bias, how), (x[:0], kernel, None if bias is None else bias[:0])


def _gradients(how: Product, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    x, kernel, bias = residuals
    lead = gradient.ndim - kernel.ndim + 1
    to_bias = None if bias is None else gradient.astype(jnp.float32).sum(tuple(range(lead))).astype(bias.dtype)
    # XLA:CPU wants float32 operands where the contracted dimension is not the minor one.
    dtype = jnp.dtype(jnp.float32) if how.platform == "cpu" else x.dtype
    over = tuple(range(lead, gradient.ndim)), tuple(range(kernel.ndim - 1))
    to_x = jax.lax.dot_general(
        gradient.astype(dtype), dense(kernel, dtype), (over, ((), ())), preferred_element_type=jnp.float32
    )
    return to_x.astype(x.dtype), None, to_bias


quantized_product.defvjp(_with_residuals, _gradients)
