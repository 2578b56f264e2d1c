"""ATen operations that multiply matrices: products, convolutions, products grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_any.aten.table import Result, cast, operation


@operation("mm", "bmm", "matmul", "mv", "dot")
def product(result: Result, a: jax.Array, b: jax.Array, *_: Any) -> jax.Array:
    """The product of two matrices, or of many pairs of them; float32 ones in full precision on TPUs too."""
    precision = jax.lax.Precision.HIGHEST if result.dtype == jnp.float32 else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=result.dtype)


@operation("addmm", "addmv", "baddbmm", "addbmm")
def add_product(result: Result, bias: Any, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """beta · bias + alpha · (a @ b)."""
    scaled = product(result, a, b)
    scaled = scaled if alpha == 1 else scaled * alpha
    return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)


@operation("linear")
def linear(result: Result, x: jax.Array, weight: jax.Array, bias: Any = None) -> jax.Array:
    """x @ weight.T + bias."""
    out = product(result, x, weight.T)
    return out if bias is None else out + bias


@operation("linalg_solve_triangular")
def solve_triangular(
    result: Result, a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    """x of a @ x = b, or of x @ a = b, for triangular a."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (a, b))
    return jax.lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@operation("_grouped_mm", "grouped_mm_fallback")
def grouped_product(
    result: Result, x: jax.Array, weights: jax.Array, offs: jax.Array | None = None, *_: Any, **__: Any
) -> jax.Array:
    """Rows x: [rows, in], ordered by expert, times each one's matrix of weights: [experts, in, out].

    Args:
        result: of the product.
        x: the rows.
        weights: of the experts.
        offs: [experts], the end of each expert's rows. Rows beyond the last are zero in the result.
    """
    assert offs is not None
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=0)
    out: jax.Array = _by_group(jnp.dtype(result.dtype))(x, weights, sizes)
    return cast(out, result.dtype)


@lru_cache(maxsize=8)
def _by_group(dtype: np.dtype[Any]) -> Any:
    """(rows [rows, in] ordered by group, weights [groups, in, out], sizes [groups]) → [rows, out] in a dtype. Under
    vmap, the rows of all members of the batch are ordered together, and multiplied at once."""
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    @jax.custom_batching.custom_vmap
    def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weights, sizes, precision=precision, preferred_element_type=dtype)

    @multiply.def_vmap
    def together(count: int, batched: Any, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
        of_x, of_weights, of_sizes = batched
        if of_weights:  # no model that is served has weights of its own for each sequence
            raise NotImplementedError("a product grouped by expert with a batch of weights")
        x = x if of_x else jnp.broadcast_to(x, (count, *x.shape))
        sizes = sizes if of_sizes else jnp.broadcast_to(sizes, (count, *sizes.shape))
        # The group of each row; those behind the last one have the number of groups, and come last.
        group = (jnp.arange(x.shape[1])[None, :, None] >= jnp.cumsum(sizes, 1)[:, None]).sum(-1).reshape(-1)
        order = jnp.argsort(group, stable=True)
        out = multiply(x.reshape(-1, x.shape[-1])[order], weights, sizes.sum(0))
        return jnp.zeros_like(out).at[order].set(out).reshape(*x.shape[:2], -1), True

    return multiply




@operation("convolution")
def convolution(
    result: Result,
    x: jax.Array,
    weight: jax.Array,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """The convolution of x: [batch, in, ...] with weight: [out, in / groups, ...].

    Args:
        result: of the convolution.
        x: the input.
        weight: the filter.
        bias: [out], or None.
        stride: along each dimension.
        padding: on both sides of each dimension.
        dilation: along each dimension.
        transposed: refused.
        output_padding: of a transposed convolution.
        groups: of channels that are convolved by themselves.
    """
    if transposed:
        raise NotImplementedError("a transposed convolution")
    dims = x.ndim - 2
    spread = [list(each) * dims if len(each) == 1 else list(each) for each in (stride, padding, dilation)]
    out = jax.lax.conv_general_dilated(
        x,
        weight,
        spread[0],
        [(width, width) for width in spread[1]],
        rhs_dilation=spread[2],
        feature_group_count=groups,
        precision=jax.lax.Precision.HIGHEST if result.dtype == jnp.float32 else None,
    )
    return out if bias is None else out + bias.reshape((1, -1) + (1,) * dims)
