"""RMS and layer normalisation. The arithmetic is float32, and the result has the input's shape and dtype."""

from __future__ import annotations

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
    """
    if spec.kind == "none":
        return x
    dims = tuple(range(-axes, 0))
    value = x.astype(jnp.float32)
    if spec.kind == "layer":
        value = value - value.mean(dims, keepdims=True)
    square = value * value
    mean = square.mean(dims, keepdims=True) if features is None else square.sum(dims, keepdims=True) / features
    value = value * jax.lax.rsqrt(mean + spec.eps)
    if spec.scale_in_fp32:
        value = _affine(value, spec, scale, bias)
        return value.astype(x.dtype)
    return _affine(value.astype(x.dtype), spec, scale, bias).astype(x.dtype)


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
