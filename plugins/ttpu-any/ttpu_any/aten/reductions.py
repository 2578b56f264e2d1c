"""ATen operations over dimensions: sums, softmax, norms, orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_any.aten.table import OPERATIONS, Result, cast, operation

Dims = int | Sequence[int] | None


def _over(dims: Dims) -> int | tuple[int, ...] | None:
    return dims if dims is None or isinstance(dims, int) else tuple(dims) or None


def _reduction(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def reduce(result: Result, x: jax.Array, dims: Dims = None, keepdim: bool = False, **_: Any) -> jax.Array:
        return cast(function(x, axis=_over(dims), keepdims=keepdim), result.dtype)

    return reduce


def _sum(result: Result, x: jax.Array, dims: Dims = None, keepdim: bool = False, **_: Any) -> jax.Array:
    return jnp.sum(cast(x, result.dtype), axis=_over(dims), keepdims=keepdim)


def _mean(result: Result, x: jax.Array, dims: Dims = None, keepdim: bool = False, **_: Any) -> jax.Array:
    return jnp.mean(cast(x, result.dtype), axis=_over(dims), keepdims=keepdim)


OPERATIONS.update(
    {
        "all": _reduction(jnp.all),
        "amax": _reduction(jnp.max),
        "amin": _reduction(jnp.min),
        "any": _reduction(jnp.any),
        "argmax": _reduction(jnp.argmax),
        "argmin": _reduction(jnp.argmin),
        "logsumexp": _reduction(jax.scipy.special.logsumexp),
        "max": _reduction(jnp.max),
        "mean": _mean,
        "min": _reduction(jnp.min),
        "prod": _reduction(jnp.prod),
        "sum": _sum,
    }
)


@operation("max.dim")
def max_along(result: Any, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The largest elements along a dimension, and where they are."""
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim).astype(jnp.int32)


@operation("min.dim")
def min_along(result: Any, x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The smallest elements along a dimension, and where they are."""
    return jnp.min(x, dim, keepdims=keepdim), jnp.argmin(x, dim, keepdims=keepdim).astype(jnp.int32)


@operation("max.other")
def larger(result: Result, a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of two elements."""
    return jnp.maximum(cast(a, result.dtype), cast(b, result.dtype))


@operation("min.other")
def smaller(result: Result, a: jax.Array, b: jax.Array) -> jax.Array:
    """The smaller of two elements."""
    return jnp.minimum(cast(a, result.dtype), cast(b, result.dtype))


@operation("var")
def variance(
    result: Result, x: jax.Array, dims: Any = None, *, correction: float = 1, keepdim: bool = False, **_: Any
) -> jax.Array:
    """The variance over dimensions."""
    dims = None if isinstance(dims, bool) else dims
    return jnp.var(x, axis=_over(dims), ddof=1 if correction is None else int(correction), keepdims=keepdim)


@operation("std")
def deviation(
    result: Result, x: jax.Array, dims: Any = None, *, correction: float = 1, keepdim: bool = False, **_: Any
) -> jax.Array:
    """The standard deviation over dimensions."""
    return jnp.sqrt(variance(result, x, dims, correction=correction, keepdim=keepdim))


@operation("var_mean")
def variance_and_mean(
    result: Any, x: jax.Array, dims: Any = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The variance and the mean over dimensions."""
    spread = variance(result, x, dims, correction=correction, keepdim=keepdim)
    return spread, jnp.mean(x, axis=_over(dims), keepdims=keepdim)


@operation("linalg_vector_norm")
def vector_norm(
    result: Result, x: jax.Array, order: float = 2, dims: Dims = None, keepdim: bool = False, **_: Any
) -> jax.Array:
    """The norm of x as vectors over dimensions."""
    x = cast(x, result.dtype)
    if order == 2:
        return jnp.sqrt(jnp.sum(x * x, axis=_over(dims), keepdims=keepdim))
    if order in (float("inf"), float("-inf")):
        return (jnp.max if order > 0 else jnp.min)(jnp.abs(x), axis=_over(dims), keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.abs(x) ** order, axis=_over(dims), keepdims=keepdim), 1 / order)


@operation("_softmax", "softmax", "_safe_softmax")
def softmax(result: Result, x: jax.Array, dim: int, *_: Any, **__: Any) -> jax.Array:
    """Softmax along a dimension."""
    return jax.nn.softmax(cast(x, jnp.promote_types(result.dtype, jnp.float32)), axis=dim).astype(result.dtype)


@operation("_log_softmax", "log_softmax")
def log_softmax(result: Result, x: jax.Array, dim: int, *_: Any, **__: Any) -> jax.Array:
    """The logarithm of softmax along a dimension."""
    return jax.nn.log_softmax(cast(x, jnp.promote_types(result.dtype, jnp.float32)), axis=dim).astype(result.dtype)


@operation("cumsum")
def cumsum(result: Result, x: jax.Array, dim: int, **_: Any) -> jax.Array:
    """Sums of all elements up to each one."""
    return jnp.cumsum(cast(x, result.dtype), axis=dim) if x.ndim else cast(x, result.dtype)


@operation("cumprod")
def cumprod(result: Result, x: jax.Array, dim: int, **_: Any) -> jax.Array:
    """Products of all elements up to each one."""
    return jnp.cumprod(cast(x, result.dtype), axis=dim)


@operation("cummax")
def cummax(result: Any, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """The largest of all elements up to each one, and where it is."""
    largest = jax.lax.cummax(x, dim % x.ndim)
    here = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    return largest, jax.lax.cummax(jnp.where(x == largest, here, 0), dim % x.ndim)


@operation("sort")
def sort(
    result: Any, x: jax.Array, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> tuple[jax.Array, jax.Array]:
    """x in order along a dimension, and where each element was."""
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(jnp.int32)


@operation("sort.stable")
def stable_sort(
    result: Any, x: jax.Array, *, stable: Any = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x in order along a dimension, and where each element was; equal ones keep their order."""
    return sort(result, x, dim, descending)


@operation("argsort")
def argsort(result: Result, x: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
    """Where the elements of x are in their order."""
    return sort(result, x, *arguments, **keywords)[1]


@operation("topk")
def topk(
    result: Any, x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The k largest elements along a dimension, or the smallest, and where they are."""
    values, places = sort(result, x, dim, largest)
    return (
        jax.lax.slice_in_dim(values, 0, k, axis=dim % x.ndim),
        jax.lax.slice_in_dim(places, 0, k, axis=dim % x.ndim),
    )


@operation("searchsorted", "bucketize")
def searchsorted(
    result: Result, sequence: jax.Array, values: Any, *, right: bool = False, side: str | None = None, **_: Any
) -> jax.Array:
    """Where the values would be in an ordered sequence."""
    return jnp.searchsorted(sequence, values, side="right" if right or side == "right" else "left").astype(jnp.int32)


@operation("bucketize")
def bucketize(result: Result, values: Any, sequence: jax.Array, **keywords: Any) -> jax.Array:
    """Where the values would be in an ordered sequence."""
    return searchsorted(result, sequence, values, **keywords)


@operation("histc")
def histc(result: Result, x: jax.Array, bins: int = 100, low: float = 0, high: float = 0) -> jax.Array:
    """How many elements are in each of equal ranges."""
    width = (high - low) / bins
    places = jnp.clip(jnp.floor((x - low) / width), 0, bins - 1).astype(jnp.int32).reshape(-1)
    inside = ((x >= low) & (x <= high)).reshape(-1)
    return jnp.zeros(bins, result.dtype).at[places].add(inside.astype(result.dtype))


@operation("native_layer_norm")
def layer_norm(
    result: Any, x: jax.Array, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[jax.Array, ...]:
    """Layer norm, the mean and the reciprocal of the deviation."""
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(dims, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(wide - mean).mean(dims, keepdims=True) + eps)
    out = (wide - mean) * scale
    out = out if weight is None else out * weight.astype(wide.dtype)
    out = out if bias is None else out + bias.astype(wide.dtype)
    return out.astype(x.dtype), mean.astype(result[1].dtype), scale.astype(result[2].dtype)


@operation("_fused_rms_norm", "rms_norm")
def rms_norm(result: Any, x: jax.Array, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """RMS norm, and the reciprocal of the root mean square where torch asks for it."""
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.square(wide).mean(dims, keepdims=True) + (jnp.finfo(x.dtype).eps if eps is None else eps))
    out = wide * scale
    out = (out if weight is None else out * weight.astype(wide.dtype)).astype(x.dtype)
    return (out, scale) if isinstance(result, tuple) else out


@operation("native_group_norm")
def group_norm(
    result: Any, x: jax.Array, weight: Any, bias: Any, batch: int, channels: int, rest: int, groups: int, eps: float
) -> tuple[jax.Array, ...]:
    """Group norm of x: [batch, channels, ...], the means and the reciprocals of the deviations."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(batch, groups, -1)
    mean = wide.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps)
    out = ((wide - mean) * scale).reshape(x.shape)
    aligned = (1, channels) + (1,) * (x.ndim - 2)
    out = out if weight is None else out * weight.reshape(aligned)
    out = out if bias is None else out + bias.reshape(aligned)
    return out.astype(x.dtype), mean[..., 0].astype(result[1].dtype), scale[..., 0].astype(result[2].dtype)
