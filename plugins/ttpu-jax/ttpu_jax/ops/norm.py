"""RMS and layer normalisation. The arithmetic is float32, and the result has the input's shape and dtype."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from ttpu_core.spec import NormSpec


def normalize(
    x: jax.Array,
    spec: NormSpec,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axes: int = 1,
    features: int | None = None,
    by_feature: bool = False,
    total: jax.Array | None = None,
) -> jax.Array:
    """Normalise over the last `axes` axes and return an array of the same shape and dtype.

    Families differ in whether the scale multiplies before or after the cast back to x's dtype (`scale_in_fp32`),
    which matters only below float32. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450.

    Args:
        x: [..., features].
        spec: the kind of norm.
        scale: [features], or None.
        bias: [features], or None.
        axes: number of trailing axes over which statistics are computed.
        features: divisor of the mean square if some features are padding; None counts all features.
        by_feature: compute the root for each feature in place of once for each row. XLA:TPU does that within the
            operation that reads the result, where a root for each row is an operation of its own. The values are the
            same.
        total: float32 [..., 1], `sum_of_squares` of x, if it is there already; for RMSNorm over the last axis.
    """
    if spec.kind == "none":
        return x
    dims = tuple(range(-axes, 0))
    value = x.astype(jnp.float32)
    if spec.kind == "layer":
        value = value - value.mean(dims, keepdims=True)
    square = value * value
    if total is None:
        total = square.sum(dims, keepdims=True)
    if by_feature:  # adds zeros, which differ from feature to feature as far as XLA can see
        total = total + jax.lax.stop_gradient(jnp.minimum(square, 0))
    mean = total / (features or prod(x.shape[dim] for dim in dims))
    value = value * jax.lax.rsqrt(mean + spec.eps)
    if spec.scale_in_fp32:
        value = _affine(value, spec, scale, bias)
        return value.astype(x.dtype)
    return _affine(value.astype(x.dtype), spec, scale, bias).astype(x.dtype)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Of the features of x [..., features]: float32 [..., 1]."""
    value = x.astype(jnp.float32)
    return (value * value).sum(-1, keepdims=True)


def _affine(value: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if scale is not None:
        factor = scale.astype(value.dtype)
        if spec.offset:
            factor = factor + spec.offset
        if spec.offset and not spec.offset_in_fp32:  # XLA drops the rounding of a cast there and back
            kept = jnp.finfo(scale.dtype)
            factor = jax.lax.reduce_precision(factor, kept.nexp, kept.nmant)
        value = value * factor
    return value if bias is None else value + bias.astype(value.dtype)
