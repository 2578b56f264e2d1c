"""GPTQ (arXiv 2210.17323): rounds a matrix input by input, and corrects the inputs that are still to come for the error
of each, by the second moments of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ttpu_core.quantization.rounding import MANTISSA, round_kernel
from ttpu_core.spec.kernel_format import KernelFormat, PartName
from ttpu_quantize.clipping import best_scales, nearest
from ttpu_quantize.refining import Rounded, refine

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

Order = Literal["none", "static", "group"]
BLOCK = 128


@dataclass(frozen=True)
class GPTQ:
    """How GPTQ rounds.

    Attributes:
        damping: added to the diagonal of the second moments, as a share of its mean.
        order: in which order inputs are rounded. "none": as they come. "static": the largest second moment first,
            with the scales of neighbouring inputs. "group": the same, and inputs rounded one after another share a
            scale, so that the kernel has an input order.
        clip: choose scales that may clip the largest weights, see `ttpu_quantize.clipping`; False for those that hold
            them.
        passes: how often scales and values are corrected afterwards, see `ttpu_quantize.refining`; 0 for plain GPTQ.
    """

    damping: float = 0.01
    order: Order = "static"
    clip: bool = True
    passes: int = 4

    def round(self, weights: Array, moments: Array, form: KernelFormat) -> dict[PartName, Array]:
        """Round a matrix.

        Args:
            weights: float32 [out, in].
            moments: [in, in], the sum or mean of x xᵀ over the inputs x; zeros round to nearest.
            form: the format; with `input_order` if the order is "group" and it has groups.

        Returns:
            The parts of the kernel, as `ttpu_core.quantization.rounding.round_kernel` returns them; with `input_order`
            [in] if the format has one.
        """
        inputs = weights.shape[1]
        plain = replace(form, input_order=False)
        diagonal = np.diagonal(moments).astype(np.float64)
        if not diagonal.any():
            parts = round_kernel(weights, plain)
            return parts | {"input_order": np.arange(inputs, dtype=np.int32)} if form.input_order else parts
        order = np.arange(inputs) if self.order == "none" else np.argsort(-diagonal, kind="stable")
        # An input that is always zero may have any weight: the moments of one leave it as it is.
        dead = diagonal == 0
        hessian = moments.astype(np.float64)
        hessian[dead, dead] = 1.0
        hessian[np.diag_indices(inputs)] += self.damping * hessian.diagonal().mean()
        upper = _inverse_factor(hessian[np.ix_(order, order)])
        permuted = weights[:, order].astype(np.float32)
        importance = (1.0 / np.diagonal(upper) ** 2).astype(np.float32)  # of an error that others are corrected for
        size = form.group_size or inputs
        scales = np.ones((len(weights), inputs // size), np.float32)
        zeros = np.zeros_like(scales)
        group_of = np.arange(inputs) // size
        if self.order == "static":
            in_place = np.empty_like(importance)
            in_place[order] = importance
            scales, zeros = self._scales(weights.reshape(len(weights), -1, size), in_place.reshape(-1, size), plain)
            group_of = order // size
        values = np.empty_like(permuted)
        block = BLOCK if size >= inputs else size * max(1, BLOCK // size)
        for start in range(0, inputs, block):
            stop = min(start + block, inputs)
            errors = np.empty((len(weights), stop - start), np.float32)
            for column in range(start, stop):
                if self.order != "static" and column % size == 0:
                    own = slice(column, column + size)
                    found = self._scales(permuted[:, None, own], importance[None, own], plain)
                    scales[:, [column // size]], zeros[:, [column // size]] = found
                scale, zero = scales[:, group_of[column]], zeros[:, group_of[column]]
                values[:, column] = nearest(permuted[:, column] / scale, zero, form)
                difference = permuted[:, column] - (values[:, column] - zero) * scale
                error = difference / np.float32(upper[column, column])
                errors[:, column - start] = error
                following = upper[column, column + 1 : stop].astype(np.float32)
                permuted[:, column + 1 : stop] -= np.outer(error, following)
            permuted[:, stop:] -= errors @ upper[start:stop, stop:].astype(np.float32)
        if self.passes:
            rounded = Rounded(values, scales, zeros, group_of)
            in_order = hessian[np.ix_(order, order)].astype(np.float32)
            refine(rounded, weights[:, order].astype(np.float32), in_order, plain, self.passes)
        return _parts(values, scales, zeros, order, form)

    def _scales(self, weights: Array, importance: Array, form: KernelFormat) -> tuple[Array, Array]:
        """Scales and zero points [out, groups] for weights [out, groups, size]; importance: [groups, size]."""
        if self.clip:
            return best_scales(weights, importance, form)
        parts = round_kernel(weights, replace(form, group_size=None))
        scale = parts["scale"]
        return scale, parts.get("zero_point", np.zeros_like(scale)).astype(np.float32)


def _inverse_factor(hessian: Array) -> Array:
    """The upper factor U of the inverse, inverse = Uᵀ U, by two Cholesky factorizations."""
    lower = np.linalg.cholesky(hessian)
    inverse_lower = np.linalg.solve(lower, np.eye(len(hessian)))
    inverse = inverse_lower.T @ inverse_lower
    return np.ascontiguousarray(np.linalg.cholesky(inverse).T)


def _parts(values: Array, scales: Array, zeros: Array, order: Array, form: KernelFormat) -> dict[PartName, Array]:
    """The parts of a kernel whose values [out, in] are in the order in which inputs were rounded."""
    if not form.input_order:
        in_place = np.empty_like(values)
        in_place[:, order] = values
        values = in_place
    shape = scales.shape if form.group_size is not None else scales.shape[:1]
    parts: dict[PartName, Array] = {
        "values": values if form.dtype in MANTISSA else values.astype(np.int8),
        "scale": scales.reshape(shape),
    }
    if not form.symmetric:
        parts["zero_point"] = zeros.reshape(shape).astype(np.int8)
    if form.input_order:
        parts["input_order"] = order.astype(np.int32)
    return parts
