"""RMS and layer normalisation over the last axis, in float32 inside. In: [..., features]; out: the same shape and
dtype."""

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
    """x [..., features], scale and bias [features]; the statistics run over the last `axes` axes. `features` is how
    many the mean square is a mean of, where some of x are padding.

    Families differ in whether the scale multiplies before or after the cast back to x's dtype (`scale_in_fp32`), which
    only matters below float32. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450.
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
        value = value * ((scale.astype(value.dtype) + spec.offset) if spec.offset else scale.astype(value.dtype))
    return value if bias is None else value + bias.astype(value.dtype)
