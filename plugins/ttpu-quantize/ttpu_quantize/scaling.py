"""AWQ and SmoothQuant: both multiply the columns of matrices by scales that are folded into what makes their inputs,
and then round to nearest. They differ in how they find the scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ttpu_core.calibration import InputStatistics
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_quantize.folding import Fold, symmetric

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

GRID = 20
"""Exponents that AWQ tries: 0, 1/GRID, ... below 1."""


@dataclass(frozen=True)
class ObservedLayer:
    """A layer, and what was observed of its products. Applying a fold changes arrays and statistics.

    Attributes:
        arrays: path → float32 array.
        statistics: path → statistics of the inputs.
        forms: path → format of the kernels that are quantized.
    """

    arrays: dict[str, Array]
    statistics: dict[str, InputStatistics]
    forms: Mapping[str, KernelFormat]

    def consumers(self, fold: Fold) -> list[str]:
        """The quantized kernels that read the fold's inputs and were observed."""
        return [path for path in fold.consumers if path in self.forms and path in self.statistics]


class Scaling(Protocol):
    """Finds the scales of a fold."""

    def scales(self, fold: Fold, layer: ObservedLayer) -> Array | None:
        """Scales [in], or [experts, in], of the fold in the layer, or None to leave it alone."""
        ...


@dataclass(frozen=True)
class AWQ:
    """Activation-aware scaling (arXiv 2306.00978): scales are the mean magnitudes of the inputs to the power that makes
    the error of the products, over the calibration text, least. The power 0 is rounding to nearest. Where that makes
    the error less, the scales of the format clip the largest weights."""

    def scales(self, fold: Fold, layer: ObservedLayer) -> Array | None:
        """See `Scaling`."""
        seen = layer.consumers(fold)
        if not seen:
            return None
        magnitude = _together([_mean(layer.statistics[path]) for path in seen], fold)
        best: tuple[float, Array | None] = (sum(_error(layer, path, None) for path in seen), None)
        for step in range(1, GRID):
            scales = np.maximum(magnitude, 1e-8) ** np.float32(step / GRID)
            scales = scales / np.sqrt(scales.max(-1, keepdims=True) * scales.min(-1, keepdims=True))
            scales = symmetric(fold, scales.astype(np.float32))
            error = sum(_error(layer, path, scales) for path in seen)
            if error < best[0]:
                best = error, scales
        return best[1]


@dataclass(frozen=True)
class SmoothQuant:
    """SmoothQuant (arXiv 2211.10438): scales max |x| ** strength / max |w| ** (1 - strength) move the outliers of
    activations into the weights. Only what reads a norm is scaled, as in the paper.

    Attributes:
        strength: 0 leaves the activations as they are, 1 makes all their features equally large.
    """

    strength: float = 0.5

    def scales(self, fold: Fold, layer: ObservedLayer) -> Array | None:
        """See `Scaling`."""
        seen = layer.consumers(fold)
        if not seen or fold.kind != "norm":
            return None
        features = layer.arrays[seen[0]].shape[-1]
        inputs = np.max([layer.statistics[path].largest.reshape(-1, features).max(0) for path in seen], axis=0)
        weights = np.max([np.abs(layer.arrays[path]).reshape(-1, features).max(0) for path in seen], axis=0)
        found = np.maximum(inputs, 1e-5) ** self.strength / np.maximum(weights, 1e-5) ** (1 - self.strength)
        return np.maximum(found, 1e-5).astype(np.float32)


def squared_error(difference: Array, products: Array) -> float:
    """The sum over inputs x of |difference x|², for difference [out, in] and the sum of x xᵀ, [in, in]."""
    return float(np.einsum("oi,oi->", difference @ products, difference))


def _together(means: list[Array], fold: Fold) -> Array:
    """Mean magnitudes [in] of what all consumers read; of an expert's own inputs [experts, in] for `down`."""
    if fold.kind != "norm":
        return means[0]
    flat = [mean.reshape(-1, mean.shape[-1]).mean(0) for mean in means]
    return np.asarray(np.mean(flat, axis=0))


def _mean(statistics: InputStatistics) -> Array:
    return np.asarray(statistics.magnitude / np.maximum(statistics.tokens, 1)[..., None], np.float32)


def _error(layer: ObservedLayer, path: str, scales: Array | None) -> float:
    """The squared error of the products with a kernel [*out, in], or [experts, *out, in], that is rounded."""
    kernel, products, form = layer.arrays[path], layer.statistics[path].products, layer.forms[path]
    if products.ndim == 2:
        kernel, products = kernel[None], products[None]
        scales = None if scales is None else scales[None]
    total = 0.0
    for expert, (weights, moments) in enumerate(zip(kernel, products, strict=True)):
        flat = weights.reshape(-1, weights.shape[-1])
        own = np.float32(1) if scales is None else scales[min(expert, len(scales) - 1)] if scales.ndim == 2 else scales
        rounded = dequantize(round_kernel(flat * own, form), form) / own
        total += squared_error(rounded - flat, moments)
    return total
