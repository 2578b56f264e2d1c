"""Matrix products of activations with kernels stored [out, in]. In: activations [..., in]; out: [..., *out] in the
activations' dtype, accumulated in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    flatten: bool = True,
    widen_rows: int | None = None,
) -> jax.Array:
    """x [..., in] times kernel [*out, in], plus bias [*out]: [..., *out] in `out_dtype` (default: x's).

    `flatten` merges the kernel's output dimensions, which costs nothing on one device: XLA:CPU runs a product with a
    kernel of more than two dimensions by a naive loop. Across devices they stay apart, because an inner one may be cut.

    XLA:CPU multiplies bfloat16 by a naive loop too, eight times slower, unless both operands contract their minor
    dimension, the result is float32 and there are at least two rows; so a single row is doubled. On a TPU a second row
    is free. From `widen_rows` rows on, bfloat16 operands are made float32 before the product: XLA:CPU otherwise
    converts each block of the kernel again for every block of rows.
    """
    out_dtype = out_dtype or x.dtype
    out_shape = (*x.shape[:-1], *kernel.shape[:-1])
    rows = x.reshape(-1, x.shape[-1])
    if flatten:
        kernel = kernel.reshape(-1, kernel.shape[-1])
        bias = None if bias is None else bias.reshape(-1)
    single = rows.shape[0] == 1 and x.dtype == jnp.bfloat16
    if single:
        rows = jnp.concatenate([rows, rows])
    if widen_rows is not None and x.dtype == jnp.bfloat16 and rows.shape[0] >= widen_rows:
        rows, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    dimensions = (((1,), (kernel.ndim - 1,)), ((), ()))
    product = jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=jnp.float32)
    if single:
        product = product[:1]
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(out_dtype).reshape(out_shape)
