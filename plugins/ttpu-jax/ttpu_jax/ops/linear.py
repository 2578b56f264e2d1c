"""Matrix products of activations with kernels [out, in]: dense, quantized or with low-rank adapters, by the kernel's
type. Sums are in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import Kernel, LowRankKernel, QuantizedKernel


@dataclass(frozen=True)
class _Product:
    """How a product is computed: see `linear`."""

    out_dtype: Any
    flatten: bool
    widen_rows: int | None


def linear(
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    flatten: bool = True,
    widen_rows: int | None = None,
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

    XLA:CPU multiplies bfloat16 by a naive loop too, eight times slower, unless both operands contract their minor
    dimension, the result is float32 and there are at least two rows; so a single row is doubled. On a TPU a second row
    is free.
    """
    return _linear(kernel, x, bias, _Product(out_dtype or x.dtype, flatten, widen_rows))


@singledispatch
def _linear(kernel: Any, x: jax.Array, bias: jax.Array | None, how: _Product) -> jax.Array:
    return _dense(x, kernel, None, bias, how)


@_linear.register
def _(kernel: QuantizedKernel, x: jax.Array, bias: jax.Array | None, how: _Product) -> jax.Array:
    # int8 is exact in bfloat16, and a scale of the output channel can wait for the float32 sum.
    return _dense(x, kernel.values.astype(x.dtype), kernel.scale, bias, how)


@_linear.register
def _(kernel: LowRankKernel, x: jax.Array, bias: jax.Array | None, how: _Product) -> jax.Array:
    """All adapters are applied to all tokens, and a mask between the two products keeps each token's own: two dense
    products, which a TPU does at the speed of its memory, read each adapter once per step. A gather per token would
    read it once per token, and grouped products would depend on the batch. For 8 adapters of rank 16 at Llama-3.1-8B's
    sizes that adds 16% to the multiplications of queries, keys and values, and 7% to those of gate and up."""
    product = _linear(kernel.base, x, bias, how)
    if kernel.adapters is None:
        return product
    count, rank, _ = kernel.a.shape
    wide = replace(how, out_dtype=jnp.dtype(jnp.float32), widen_rows=None)
    narrow = _dense(x, kernel.a, None, None, wide)
    own = (kernel.adapters[:, None] == 1 + jnp.arange(count)).reshape(*x.shape[:-1], count, 1)
    narrow = jnp.where(own, narrow, 0).astype(x.dtype).reshape(*x.shape[:-1], count * rank)
    added = _dense(narrow, kernel.b.reshape(*kernel.b.shape[:-2], count * rank), None, None, wide)
    # Added to the rounded product, as PEFT does: devices that have a part of it each exchange half the bytes.
    return (product + added).astype(product.dtype)


def _dense(
    x: jax.Array, kernel: jax.Array, scale: jax.Array | None, bias: jax.Array | None, how: _Product
) -> jax.Array:
    """x [..., in] times kernel [*out, in], times scale [*out], plus bias [*out]."""
    out_shape = (*x.shape[:-1], *kernel.shape[:-1])
    rows = x.reshape(-1, x.shape[-1])
    if how.flatten:
        kernel = kernel.reshape(-1, kernel.shape[-1])
        scale, bias = (None if each is None else each.reshape(-1) for each in (scale, bias))
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if single:
        rows = jnp.concatenate([rows, rows])
    if how.widen_rows is not None and x.dtype == jnp.bfloat16 and rows.shape[0] >= how.widen_rows:
        rows, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    dimensions = (((1,), (kernel.ndim - 1,)), ((), ()))
    product = jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=jnp.float32)
    if single:
        product = product[:1]
    if scale is not None:
        product = product * scale
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(how.out_dtype).reshape(out_shape)
