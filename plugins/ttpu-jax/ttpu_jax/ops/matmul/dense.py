"""The product of activations with a dense kernel [*out, in], which quantized kernels end in too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.matmul.devices import Devices

FEW_ROWS = range(2, 65)
"""Rows of float32 that XLA:CPU multiplies faster with the kernel on the left."""


@dataclass(frozen=True)
class Product:
    """How a product is computed: see `ttpu_jax.ops.linear.linear`."""

    out_dtype: Any
    flatten: bool = True
    widen_rows: int | None = None
    platform: str = "cpu"
    devices: Devices | None = None


def dense_product(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    how: Product,
    *,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
) -> jax.Array:
    """(x times kernel, less the sum of x's features times `offset`) times `scale`, plus bias: [..., *out].

    Args:
        x: [..., in].
        kernel: [*out, in] in x's dtype.
        bias: [*out].
        how: the dtype of the result, and how the product is computed.
        scale: float32 [*out], of each output channel.
        offset: [*out], of each output channel; in any dtype.
    """
    out_shape = (*x.shape[:-1], *kernel.shape[:-1])
    rows = x.reshape(-1, x.shape[-1])
    if how.flatten:
        kernel = kernel.reshape(-1, kernel.shape[-1])
        scale, offset, bias = (None if each is None else each.reshape(-1) for each in (scale, offset, bias))
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if single:
        rows = jnp.concatenate([rows, rows])
    if how.widen_rows is not None and x.dtype == jnp.bfloat16 and rows.shape[0] >= how.widen_rows:
        rows, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    if _kernel_first(rows, kernel, how.platform):
        product = _turned(rows, kernel)
    else:
        dimensions = (((1,), (kernel.ndim - 1,)), ((), ()))
        product = jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=jnp.float32)
    if offset is not None:
        sums = rows.astype(jnp.float32).sum(-1).reshape(-1, *(1,) * offset.ndim)
        product = product - sums * offset.astype(jnp.float32)
    if single:
        product = product[:1]
    if scale is not None:
        product = product * scale.astype(jnp.float32)
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(how.out_dtype).reshape(out_shape)


def _kernel_first(rows: jax.Array, kernel: jax.Array, platform: str) -> bool:
    few = kernel.ndim == 2 and rows.shape[0] in FEW_ROWS
    return platform == "cpu" and few and rows.dtype == kernel.dtype == jnp.float32


def _turned(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """rows [rows, in] times kernel [out, in] as the transpose of kernel times the transposed rows: XLA:CPU packs a
    kernel that it contracts on the right along its rows, in every step anew. Eight rows take 0.55 to 0.75 of the time.
    Without the barriers XLA turns the product back."""
    columns = jax.lax.optimization_barrier(rows.T)
    return jax.lax.optimization_barrier(kernel @ columns).T
