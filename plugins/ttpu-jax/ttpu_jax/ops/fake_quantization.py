"""Numbers rounded to what their quantized form stands for, in floating point: for training that is aware of
quantization (arXiv 1712.05877, section 3). The gradient of rounding counts as the identity (straight-through, arXiv
1308.3432)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat
from ttpu_jax.ops.kernels import dense, quantize
from ttpu_jax.ops.matmul.activations import quantize_activations


def fake_quantize(kernel: jax.Array, form: KernelFormat) -> jax.Array:
    """Round a dense kernel to the numbers that `quantize` followed by `dense` gives.

    Args:
        kernel: [*out, in].
        form: the format, without an input order and a static scale of activations.

    Returns:
        [*out, in] in the kernel's dtype; its gradient is that of the kernel.

    Raises:
        RequestError: the group size does not divide the inputs.
        ValueError: the format has an input order or a static scale.
    """
    return _straight_through(kernel, dense(quantize(kernel, form)))


def fake_quantize_activations(
    x: jax.Array, form: ActivationFormat, input_scale: jax.Array | None = None
) -> jax.Array:
    """Round activations to what their quantized values stand for.

    Args:
        x: [..., in].
        form: the dtype of the values, and where the scale comes from.
        input_scale: the static scale, which broadcasts against [..., 1].

    Returns:
        [..., in] in x's dtype; its gradient is that of x.
    """
    values, scale = quantize_activations(x, form, input_scale)
    return _straight_through(x, values.astype(jnp.float32) * scale)


def _straight_through(exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """The rounded numbers, with the gradient of the exact ones, both [...]."""
    return jax.lax.stop_gradient(rounded.astype(exact.dtype)) + (exact - jax.lax.stop_gradient(exact))
