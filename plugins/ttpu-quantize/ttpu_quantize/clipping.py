"""Scales that clip: a smaller scale rounds most weights of a group more finely, at the cost of its largest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ttpu_core.quantization.rounding import MANTISSA, round_float, round_kernel
from ttpu_core.spec.kernel_format import LARGEST, KernelFormat, PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

FACTORS = np.linspace(1.0, 0.6, 17, dtype=np.float32)
"""Of the scale that holds the largest weight."""


def best_scales(weights: Array, importance: Array, form: KernelFormat) -> tuple[Array, Array]:
    """The scales that make the sum of importance * (weight - rounded weight)² least, of all `FACTORS`.

    Args:
        weights: float32 [out, groups, size].
        importance: [groups, size], the second moments of the inputs.
        form: the format.

    Returns:
        Scales and zero points, float32 [out, groups].
    """
    plain = round_kernel(weights, replace(form, group_size=None, input_order=False))
    scale = plain["scale"].astype(np.float32)
    zero = plain.get("zero_point", np.zeros_like(scale)).astype(np.float32)
    held = np.dtype(getattr(ml_dtypes, form.scale_dtype, form.scale_dtype))
    best, least = scale, np.full(scale.shape, np.inf, np.float32)
    for factor in FACTORS:
        tried = (scale * factor).astype(held).astype(np.float32)
        tried = np.where(tried > 0, tried, scale)
        values = nearest(weights / tried[..., None], zero[..., None], form)
        differences = (values - zero[..., None]) * tried[..., None] - weights
        error = (importance * differences**2).sum(-1, dtype=np.float32)
        best, least = np.where(error < least, tried, best), np.minimum(error, least)
    return best, zero


def round_clipped(weights: Array, importance: Array, form: KernelFormat) -> dict[PartName, Array]:
    """Round a matrix [out, in] to nearest with the scales of `best_scales`; importance: [in]."""
    outputs, inputs = weights.shape
    groups = form.groups(inputs)
    grouped = weights.astype(np.float32).reshape(outputs, groups, -1)
    scale, zero = best_scales(grouped, importance.reshape(groups, -1), form)
    values = nearest(grouped / scale[..., None], zero[..., None], form).reshape(weights.shape)
    shape = scale.shape if form.group_size is not None else scale.shape[:1]
    parts: dict[PartName, Array] = {
        "values": values if form.dtype in MANTISSA else values.astype(np.int8),
        "scale": scale.reshape(shape),
    }
    if not form.symmetric:
        parts["zero_point"] = zero.reshape(shape).astype(np.int8)
    return parts


def nearest(quotients: Array, zero: Array, form: KernelFormat) -> Array:
    """The nearest value of the format to each quotient of weight and scale, float32, in the shape of both. Integers use
    all of their range, -8 too for int4: in symmetric groups that is one level more, and 5 % less error after GPTQ."""
    largest = LARGEST[form.dtype]
    if form.dtype in MANTISSA:
        return round_float(np.clip(quotients, -largest, largest), form.dtype)
    return np.clip(np.round(quotients) + zero, -largest - 1, largest).astype(np.float32)
