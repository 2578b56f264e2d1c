"""Coordinate descent on the error of a rounded matrix's products: scales and values are corrected in turn, each to the
best that it can be while all others stay (as QuantEase does for values, arXiv 2309.01885)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_quantize.clipping import nearest

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 128
"""Inputs whose products with the errors are computed at a time."""


@dataclass
class Rounded:
    """A matrix of rounded weights.

    Attributes:
        values: float32 [out, in].
        scales: float32 [out, groups].
        zeros: float32 [out, groups], the zero points.
        group_of: [in], the group of each input.
    """

    values: Array
    scales: Array
    zeros: Array
    group_of: Array

    @property
    def weights(self) -> Array:
        """The weights that the values stand for, float32 [out, in]."""
        return (self.values - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]


def refine(rounded: Rounded, weights: Array, moments: Array, form: KernelFormat, passes: int) -> None:
    """Correct scales and values in place so that the error (w - r) H (w - r)ᵀ of each row falls, or stays.

    Args:
        rounded: what is corrected.
        weights: float32 [out, in], which it stands for.
        moments: H, float32 [in, in], positive definite.
        form: of the values and the scales.
        passes: how often every scale and every value is corrected.
    """
    for _ in range(passes):
        _refine_scales(rounded, weights, moments, form)
        _refine_values(rounded, weights, moments, form)


def _refine_scales(rounded: Rounded, weights: Array, moments: Array, form: KernelFormat) -> None:
    held = np.dtype(getattr(ml_dtypes, form.scale_dtype, form.scale_dtype))
    errors = weights - rounded.weights
    for group in range(rounded.scales.shape[1]):
        own = np.flatnonzero(rounded.group_of == group)
        steps = rounded.values[:, own] - rounded.zeros[:, [group]]
        slope = ((errors @ moments[:, own]) * steps).sum(1)
        curvature = ((steps @ moments[np.ix_(own, own)]) * steps).sum(1)
        scale = rounded.scales[:, group]
        better = scale + slope / np.where(curvature > 0, curvature, 1)
        better = better.astype(held).astype(np.float32)
        change = better - scale
        # A scale that is rounded to its dtype may be worse than the one before.
        falls = (better > 0) & np.isfinite(better) & (change * (2 * slope - change * curvature) > 0)
        change = np.where(falls, change, 0)
        errors[:, own] -= steps * change[:, None]
        rounded.scales[:, group] = np.where(falls, better, scale)


def _refine_values(rounded: Rounded, weights: Array, moments: Array, form: KernelFormat) -> None:
    errors = weights - rounded.weights
    diagonal = moments.diagonal()
    for start in range(0, weights.shape[1], BLOCK):
        stop = min(start + BLOCK, weights.shape[1])
        slopes = errors @ moments[:, start:stop]
        for column in range(start, stop):
            group = rounded.group_of[column]
            scale, zero, value = rounded.scales[:, group], rounded.zeros[:, group], rounded.values[:, column]
            wanted = (value - zero) * scale + slopes[:, column - start] / diagonal[column]
            found = nearest(wanted / scale, zero, form)
            change = (found - value) * scale
            rounded.values[:, column] = found
            errors[:, column] -= change
            slopes -= np.outer(change, moments[column, start:stop])
