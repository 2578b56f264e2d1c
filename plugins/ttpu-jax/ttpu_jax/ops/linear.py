"""Matrix products of activations with kernels [out, in]: dense, quantized or with low-rank adapters, by the kernel's
type. Sums are in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import AdaptedKernel, Kernel, LowRankKernel, QuantizedKernel, dense
from ttpu_jax.ops.masters import Master
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
def _(kernel: Master, x: jax.Array, bias: jax.Array | None, how: Product) -> jax.Array:
    return dense_product(x, kernel.rounded(), bias, how)


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


@_linear.register
def _(kernel: AdaptedKernel, x: jax.Array, bias: jax.Array | None, how: Product) -> jax.Array:
    """As PEFT computes it: the adapter's output is added to the base's, both multiplied by DoRA's scale first."""
    wide = replace(how, out_dtype=jnp.dtype(jnp.float32), widen_rows=None)
    added = kernel.scaling * _adapter_product(kernel, x, wide)
    if kernel.magnitude is None:
        product = _linear(kernel.base, x, bias, how)
        return (product + added).astype(product.dtype)
    product = _dora_scale(kernel) * (_linear(kernel.base, x, None, wide) + added)
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(how.out_dtype)


def _adapter_product(kernel: AdaptedKernel, x: jax.Array, wide: Product) -> jax.Array:
    """float32 [..., *out]: x [..., in] times b @ a."""
    blocks, rank, inputs = kernel.a.shape
    if kernel.key is None or not kernel.dropout:
        narrow = dense_product(x, kernel.a.reshape(blocks * rank, inputs), None, wide)
    else:
        kept = 1 - kernel.dropout
        keys = jax.random.wrap_key_data(kernel.key)
        masks = (jax.random.bernoulli(jax.random.fold_in(keys, block), kept, x.shape) for block in range(blocks))
        dropped = (jnp.where(mask, x / kept, 0).astype(x.dtype) for mask in masks)
        products = [dense_product(each, a, None, wide) for each, a in zip(dropped, kernel.a, strict=True)]
        narrow = jnp.concatenate(products, axis=-1)
    return dense_product(narrow.astype(x.dtype), kernel.b, None, wide)


def adapted_norms(kernel: AdaptedKernel) -> jax.Array:
    """float32 [*out]: the norms of the rows of base + scaling * b @ a."""
    a, b = kernel.a.astype(jnp.float32), kernel.b.astype(jnp.float32)
    change = jnp.tensordot(b, a.reshape(-1, a.shape[-1]), 1, precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.norm(dense(kernel.base, jnp.float32) + kernel.scaling * change, axis=-1)


def _dora_scale(kernel: AdaptedKernel) -> jax.Array:
    """float32 [*out]: magnitudes over the norms of the adapted kernel's rows, which count as constants; 1 for outputs
    without a magnitude."""
    assert kernel.magnitude is not None
    norms, magnitude = adapted_norms(jax.lax.stop_gradient(kernel)), kernel.magnitude.astype(jnp.float32)
    return jnp.where(magnitude == 0, 1.0, magnitude / jnp.where(norms > 0, norms, 1.0))
