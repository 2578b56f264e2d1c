"""What is quantized in a model, how, how many bytes its weights take, and what stays as it is and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ttpu_core.quantization.quantize import Choice, by_reason, is_matrix
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.arithmetic import BITS
from ttpu_core.spec.kernel_format import KernelFormat, stored_parameters

DEQUANTIZED = "held dequantized because the checkpoint quantizes the weights in it differently, or not all of them"
BY_LAYER = "as a whole: each of its layers is held as the checkpoint stores it"


@dataclass(frozen=True)
class QuantizationReport:
    """The quantization of a model.

    Attributes:
        scheme: the checkpoint's scheme, or "while loading".
        formats: format in words → number of kernels.
        weight_bytes: bytes of all weights, as a device without padding holds them.
        dense_bytes: the same without quantization.
        kept: reason → matrices that stay as they are, with * for numbers of layers.
        finer: reason → kernels whose groups are finer than those asked for.
    """

    scheme: str
    formats: Mapping[str, int]
    weight_bytes: int
    dense_bytes: int
    kept: Mapping[str, tuple[str, ...]]
    finer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        formats = "; ".join(f"{words} ({count} kernels)" for words, count in self.formats.items())
        share = f"{self.weight_bytes / 2**20:,.1f} MiB, {self.weight_bytes / self.dense_bytes:.0%} of the dense weights"
        kept = [f"not quantized, {reason}: {', '.join(paths)}" for reason, paths in self.kept.items()]
        return "\n".join([f"{self.scheme}: {formats}; {share}", *self.finer_lines, *kept])

    @property
    def finer_lines(self) -> list[str]:
        """A line per reason why groups are finer than those asked for."""
        return [f"{reason}: {', '.join(paths)}" for reason, paths in self.finer.items()]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "scheme": self.scheme,
            "formats": dict(self.formats),
            "weight_bytes": self.weight_bytes,
            "dense_bytes": self.dense_bytes,
            "kept": {reason: list(paths) for reason, paths in self.kept.items()},
            "finer": {reason: list(paths) for reason, paths in self.finer.items()},
        }


def report_of(
    spec: ArchitectureSpec,
    scheme: str,
    dtype: str,
    found: tuple[Choice, ...] | None = None,
    mixed: Mapping[str, str] = MappingProxyType({}),
) -> QuantizationReport:
    """The report of an architecture with kernel formats.

    Args:
        spec: the architecture.
        scheme: see `QuantizationReport`.
        dtype: of the parameters that are not quantized.
        found: the decisions about its matrices; None for a checkpoint that stores them so.
        mixed: path → how a kernel of such a checkpoint is held that has no format of its own (`mixed_kernels`).
    """
    formats = stored_formats(spec)
    quantized = dict(spec.kernel_formats)
    if found is None:
        found = tuple(
            Choice(path, None, mixed.get(path, "stored so in the checkpoint"))
            for path in spec.parameters
            if is_matrix(path) and path not in quantized
        )
    return QuantizationReport(
        scheme,
        formats,
        stored_bytes(spec, dtype),
        sum(one.size * BITS[one.dtype or dtype] for one in spec.parameters.values()) // 8,
        by_reason(one for one in found if one.format is None),
        by_reason(one for one in found if one.format is not None),
    )


def stored_formats(spec: ArchitectureSpec) -> dict[str, int]:
    """Format in words → number of kernels."""
    return dict(Counter(format_words(form) for _, form in spec.kernel_formats))


def stored_bytes(spec: ArchitectureSpec, dtype: str) -> int:
    """Bytes of all weights; parameters without a format or dtype of their own in `dtype`."""
    return sum(one.size * BITS[one.dtype or dtype] for one in stored_parameters(spec.parameters).values()) // 8


def format_words(form: KernelFormat) -> str:
    """A format in words, such as "int4, groups of 128, zero points"."""
    words = [form.dtype, "one scale per channel" if form.group_size is None else f"groups of {form.group_size}"]
    words += [] if form.symmetric else ["zero points"]
    words += ["activation order"] if form.input_order else []
    if form.activation is not None:
        words.append(f"inputs {form.activation.dtype} {'per tensor' if form.activation.static else 'per token'}")
    return ", ".join(words)
