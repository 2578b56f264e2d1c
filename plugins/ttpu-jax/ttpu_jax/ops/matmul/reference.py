"""The product with a quantized kernel in float64, and how far from it an implementation may come out. The bounds are
those of docs/quantization.md, "Error bounds"."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ttpu_core.spec.kernel_format import LARGEST, ActivationFormat
from ttpu_jax.ops.kernels import QuantizedKernel

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT32 = 2.0**-24
"""The largest relative error of one rounding to float32: half a unit in the last of 24 places."""
RELATIVE = {"int8": 0.0, "float8_e4m3fn": 2.0**-4}
"""The largest relative error of rounding an activation, and below, the largest absolute one, in units of its scale."""
ABSOLUTE = {"int8": 0.5, "float8_e4m3fn": 2.0**-10}


class Reference(NamedTuple):
    """product: float64 [..., *out]. bound: the largest error of an implementation, in the same shape."""

    product: Array
    bound: Array


def reference(x: Array, kernel: QuantizedKernel, bias: Array | None = None, *, out_dtype: Any = None) -> Reference:
    """The product of the dequantized operands, and its error bound.

    x [..., in] itself is multiplied, and the rounding of activations is part of the bound, if the kernel's format
    quantizes them: at half a step, two implementations may round to either side.

    Args:
        x: [..., in].
        kernel: [*out, in].
        bias: [*out].
        out_dtype: of the implementation's result, by default x's.
    """
    form, inputs = kernel.format, x.shape[-1]
    wide = np.asarray(x).astype(np.float64)
    if kernel.input_order is not None:
        wide = wide[..., np.asarray(kernel.input_order)]
    values, scale = (np.asarray(part).astype(np.float64) for part in (kernel.values, kernel.scale))
    zero = np.zeros_like(scale) if kernel.zero_point is None else np.asarray(kernel.zero_point).astype(np.float64)
    if form.group_size is None:
        scale, zero = scale[..., None], zero[..., None]
    scale, zero = (np.repeat(part, inputs // part.shape[-1], axis=-1) for part in (scale, zero))
    weights, terms = scale * (values - zero), scale * (np.abs(values) + np.abs(zero))

    product = _product(wide, weights)
    moved = np.zeros_like(wide) if form.activation is None else rounding_error(wide, form.activation, kernel)
    magnitudes = _product(np.abs(wide) + moved, terms)
    error = (inputs + 8) * FLOAT32 * magnitudes + _product(moved, np.abs(weights))
    if form.group_size is not None:
        error += _unit(x.dtype) * _product(np.abs(wide) + moved, np.abs(weights))
    if bias is not None:
        product = product + np.asarray(bias).astype(np.float64)
        error += 2 * FLOAT32 * np.abs(product)
    return Reference(product, error + _unit(out_dtype or x.dtype) * (np.abs(product) + error))


def rounding_error(x: Array, form: ActivationFormat, kernel: QuantizedKernel) -> Array:
    """How far quantizing may move each activation of x [..., in]; beyond a static scale's range, to its end."""
    if form.static:
        step = np.asarray(kernel.input_scale).astype(np.float64)
    else:
        step = np.abs(x).max(-1, keepdims=True) / LARGEST[form.dtype]
    rounded = np.maximum(ABSOLUTE[form.dtype] * step, RELATIVE[form.dtype] * np.abs(x)) * (1 + 2.0**-14)
    result: Array = np.maximum(rounded, np.abs(x) - LARGEST[form.dtype] * step)
    return result


def _product(x: Array, weights: Array) -> Array:
    return np.tensordot(x, weights, axes=(-1, -1))


def _unit(dtype: Any) -> float:
    """The largest relative error of one rounding to the dtype: 2^-24 for float32, 2^-8 for bfloat16."""
    return float(jnp.finfo(dtype).eps) / 2
