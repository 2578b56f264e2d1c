"""Activations rounded to the dtype in which a kernel's format wants them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec.kernel_format import LARGEST, ActivationFormat


def quantize_activations(
    x: jax.Array,
    form: ActivationFormat,
    input_scale: jax.Array | None = None,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """x ≈ values * scale.

    Args:
        x: [..., in].
        form: the dtype of the values, and where the scale comes from.
        input_scale: the static scale, which broadcasts against [..., 1]; beyond it values saturate.
        axes: mesh axes that shard the features of x, inside a shard_map: a token has one scale on all of them.

    Returns:
        Values [..., in] in the format's dtype, and a float32 scale: [..., 1], one per token (1 for a token of zeros),
        or the static one.
    """
    wide, largest = x.astype(jnp.float32), LARGEST[form.dtype]
    if form.static:
        assert input_scale is not None
        scale = input_scale.astype(jnp.float32)
    else:
        # In x's dtype, which is exact: of float32 numbers that have two uses, XLA:TPU writes a copy.
        top = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32)
        if axes:
            top = jax.lax.pmax(top, axes)
        scale = jnp.where(top > 0, top / largest, 1.0)
    steps = jnp.clip(wide / scale, -largest, largest)
    return (jnp.round(steps) if form.dtype == "int8" else steps).astype(form.dtype), scale
