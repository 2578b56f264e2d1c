"""Products with quantized kernels that XLA compiles by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import QuantizedKernel, grouped_values
from ttpu_jax.ops.matmul.activations import rounded_activations
from ttpu_jax.ops.matmul.dense import Product, dense_product


def product(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product) -> jax.Array:
    """x [..., in] times the kernel [*out, in], plus bias [*out]: [..., *out]."""
    if kernel.input_order is not None:
        x = jnp.take(x, kernel.input_order, axis=-1)
    form = kernel.format
    if form.activation is not None:
        x = rounded_activations(x, form.activation, kernel.input_scale).astype(x.dtype)
    if form.group_size is None:
        # Values are exact in bfloat16, and a scale of the output channel can wait for the float32 sum.
        values = kernel.values.astype(x.dtype)
        return dense_product(x, values, bias, how, scale=kernel.scale, offset=kernel.zero_point)
    weights = grouped_values(kernel, jnp.float32) * kernel.scale.astype(jnp.float32)[..., None]
    return dense_product(x, weights.astype(x.dtype).reshape(kernel.shape), bias, how)
