"""Matrix products of activations with kernels [out, in]: dense, quantized or with low-rank adapters, by the kernel's
type. Sums are in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import Kernel, LowRankKernel, QuantizedKernel
from ttpu_jax.ops.matmul.api import quantized_product
from ttpu_jax.ops.matmul.dense import Product, dense_product
from ttpu_jax.ops.matmul.devices import Devices


def linear(
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    flatten: bool = True,
    widen_rows: int | None = None,
    platform: str | None = None,
    devices: Devices | None = None,
) -> jax.Array:
    """x [..., in] times kernel [*out, in], plus bias [*out]: [..., *out] in `out_dtype` (default: x's).

    Args:
        x: [..., in].
        kernel: [*out, in]: an array, or one of `ttpu_jax.ops.kernels`.
        bias: [*out].
        out_dtype: of the result.
        flatten: merge the kernel's output dimensions, which costs nothing on one device: XLA:CPU runs a product with a
            kernel of more than two dimensions by a naive loop. Across devices they stay apart, because an inner one may
            be sharded.
        widen_rows: from so many rows on, bfloat16 operands are made float32 before the product: XLA:CPU otherwise
            converts each block of the kernel again for every block of rows.
        platform: cpu, tpu or gpu, where this runs, if that is not JAX's default; chooses how a quantized kernel is
            multiplied.
        devices: where this runs, for the products with quantized kernels that a mesh's devices compute by themselves;
            None leaves them to the compiler.

    XLA:CPU multiplies bfloat16 by a naive loop too, eight times slower, unless both operands contract their minor
    dimension, the result is float32 and there are at least two rows; so a single row is doubled. On a TPU a second row
    is free.
    """
    here = devices.platform if devices is not None else jax.default_backend()
    how = Product(out_dtype or x.dtype, flatten, widen_rows, platform or here, devices)
    return _linear(kernel, x, bias, how)


@singledispatch
def _linear(kernel: Any, x: jax.Array, bias: jax.Array | None, how: Product) -> jax.Array:
    return dense_product(x, kernel, bias, how)


@_linear.register
def _(kernel: QuantizedKernel, x: jax.Array, bias: jax.Array | None, how: Product) -> jax.Array:
    return quantized_product(x, kernel, bias, how)


@_linear.register
def _(kernel: LowRankKernel, x: jax.Array, bias: jax.Array | None, how: Product) -> jax.Array:
    """All adapters are applied to all tokens, and a mask between the two products keeps each token's own: two dense
    products, which a TPU does at the speed of its memory, read each adapter once per step. A gather per token would
    read it once per token, and grouped products would depend on the batch. For 8 adapters of rank 16 at Llama-3.1-8B's
    sizes that adds 16% to the multiplications of queries, keys and values, and 7% to those of gate and up."""
    product = _linear(kernel.base, x, bias, how)
    if kernel.adapters is None:
        return product
    count, rank, _ = kernel.a.shape
    wide = replace(how, out_dtype=jnp.dtype(jnp.float32), widen_rows=None)
    narrow = dense_product(x, kernel.a, None, wide)
    own = (kernel.adapters[:, None] == 1 + jnp.arange(count)).reshape(*x.shape[:-1], count, 1)
    narrow = jnp.where(own, narrow, 0).astype(x.dtype).reshape(*x.shape[:-1], count * rank)
    added = dense_product(narrow, kernel.b.reshape(*kernel.b.shape[:-2], count * rank), None, wide)
    # Added to the rounded product, as PEFT does: devices that have a part of it each exchange half the bytes.
    return (product + added).astype(product.dtype)
