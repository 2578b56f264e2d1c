"""Rounding to nearest in numpy: the reference for what every backend makes of a dense kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.spec.kernel_format import LARGEST, KernelFormat, PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

MANTISSA = {"float8_e4m3fn": 3, "float4_e2m1fn": 1}
"""Explicit bits of the significand."""
SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float4_e2m1fn": 0}
"""Exponent of the smallest normal number."""


def round_kernel(weights: Array, form: KernelFormat) -> dict[PartName, Array]:
    """Round a kernel to the nearest numbers of a format.

    Symmetric integers use the range [-largest, largest], so that a kernel and its negative have the same scales.
    Asymmetric ones use all of their range, which always includes zero. Scales are rounded to their dtype before weights
    are divided by them. A channel or group of zeros has the scale 1.

    Args:
        weights: [*out, in], finite.
        form: the format, without an input order and a static scale of activations.

    Returns:
        values [*out, in], float32 for a floating-point format and int8 for an integer one; scale [*out] or
        [*out, groups], float32; zero_point, int8, in the shape of the scale, if the format has one.

    Raises:
        RequestError: the group size does not divide the inputs.
    """
    *out, inputs = weights.shape
    groups = form.groups(inputs)
    grouped = weights.astype(np.float32).reshape(*out, groups, inputs // groups)
    largest = np.float32(LARGEST[form.dtype])
    shape = (*out, groups) if form.group_size is not None else tuple(out)
    if not form.symmetric:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scale = _scale(high - low, 2 * largest + 1, form.scale_dtype)
        zero = np.clip(np.round(-largest - 1 - low / scale), -largest - 1, largest)
        values = np.clip(np.round(grouped / scale[..., None]) + zero[..., None], -largest - 1, largest)
        return {
            "values": values.reshape(weights.shape).astype(np.int8),
            "scale": scale.reshape(shape),
            "zero_point": zero.reshape(shape).astype(np.int8),
        }
    scale = _scale(np.abs(grouped).max(-1), largest, form.scale_dtype)
    scaled = np.clip(grouped / scale[..., None], -largest, largest).reshape(weights.shape)
    if form.dtype in MANTISSA:
        return {"values": round_float(scaled, form.dtype), "scale": scale.reshape(shape)}
    return {"values": np.round(scaled).astype(np.int8), "scale": scale.reshape(shape)}


def _scale(span: Array, steps: np.float32, dtype: str) -> Array:
    """span / steps as the dtype holds it, float32; 1 where that is 0. Powers of two are rounded up, so that no weight
    is beyond the largest number."""
    scale = (span / steps).astype(np.float32)
    if dtype == "float8_e8m0fnu":
        fraction, exponent = np.frexp(scale)
        held = np.ldexp(np.float32(1), np.clip(np.where(fraction == 0.5, exponent - 1, exponent), -126, 127))
    elif dtype == "bfloat16":
        bits = scale.view(np.uint32)
        held = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    else:
        held = scale.astype(dtype).astype(np.float32)
    result: Array = np.where((scale > 0) & (held > 0), held, np.float32(1)).astype(np.float32)
    return result


def round_float(x: Array, dtype: str) -> Array:
    """The nearest numbers, ties to even, that a small float dtype holds; larger ones become the largest. float32, in
    the shape of x."""
    exponent = np.frexp(x)[1] - 1
    step = np.exp2(np.maximum(exponent, SMALLEST_EXPONENT[dtype]) - MANTISSA[dtype]).astype(np.float32)
    return np.clip(np.round(x / step) * step, -LARGEST[dtype], LARGEST[dtype]).astype(np.float32)


def dequantize(parts: dict[PartName, Array], form: KernelFormat) -> Array:
    """The kernel that the parts stand for: float32 [*out, in], its inputs in the order of the input's features."""
    values, scale = parts["values"].astype(np.float32), parts["scale"].astype(np.float32)
    *out, inputs = values.shape
    groups = form.groups(inputs)
    values = values.reshape(*out, groups, inputs // groups)
    if "zero_point" in parts:
        values = values - parts["zero_point"].astype(np.float32).reshape(*out, groups, 1)
    weights: Array = (values * scale.reshape(*out, groups, 1)).reshape(*out, inputs)
    if "input_order" not in parts:
        return weights
    order = parts["input_order"].reshape(-1, 1, inputs)
    stored = weights.reshape(len(order), -1, inputs)
    result = np.empty_like(stored)
    np.put_along_axis(result, np.broadcast_to(order, stored.shape), stored, axis=-1)
    return result.reshape(weights.shape)
