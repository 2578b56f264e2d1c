"""Reads the parts of one weight of a quantized checkpoint: its scales for groups as fine as a mesh needs them, the
static scale of an input that several weights share, all parts as numpy arrays, and the numbers that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_rows
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.quantization.packing import E4M3
from ttpu_core.quantization.rounding import dequantize
from ttpu_core.quantization.schemes.tensor import QuantizedTensor, Source
from ttpu_core.spec.kernel_format import PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


SCALES: tuple[PartName, ...] = ("scale", "zero_point")


def read_parts(weight: QuantizedTensor, reader: TensorReader, group_size: int | None = None) -> dict[PartName, Array]:
    """The parts of a weight [*lead, out, in], without the static scale of its input (`static_scale`).

    Args:
        weight: the weight.
        reader: of the checkpoint's files.
        group_size: inputs that share a scale, which divides the weight's own group size; None for that size.

    Returns:
        values [*lead, out, in]: int8, float32 for 4-bit floats, or uint8 with the bits of a float8. scale, float32, and
        zero_point, int8: [*lead, out], or [*lead, out, groups] if the weight has groups. input_order, int32 [in].

    Raises:
        CheckpointError: the file is truncated, or scales are NaN or infinite.
    """
    *out, inputs = weight.shape
    fitted = group_size or weight.group_size
    groups = 1 if fitted is None else inputs // fitted
    found: dict[PartName, Array] = {"values": _whole(weight.parts["values"], reader).reshape(weight.shape)}
    for part in SCALES:
        if part in weight.parts:
            whole = _whole(regrouped(weight, part, groups, fitted), reader)
            found[part] = whole.reshape(*out, groups) if fitted is not None else whole.reshape(out)
    if weight.order is not None:
        found["input_order"] = weight.order
    return found


def static_scale(weights: Iterable[QuantizedTensor], reader: TensorReader) -> float | None:
    """The static scale of the input that these weights share, the largest of theirs; None if they have none.

    Raises:
        CheckpointError: the file is truncated, or a scale is NaN or infinite.
    """
    scales = [one.parts["input_scale"] for one in weights if "input_scale" in one.parts]
    return float(_whole(largest_scale("input_scale", scales), reader)[0, 0]) if scales else None


def dequantized(weight: QuantizedTensor) -> DecodedTensor:
    """What a weight [*lead, out, in] stands for, float32, its inputs in the order of the input's features."""
    groups = 1 if weight.group_size is None else weight.shape[-1] // weight.group_size
    values = weight.parts["values"]
    parts = [part for part in SCALES if part in weight.parts]
    by_group = {part: regrouped(weight, part, groups, weight.group_size) for part in parts}

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        stored = _rows(values, reader, start, stop)
        found = {part: _rows(source, reader, start, stop) for part, source in by_group.items()}
        found["values"] = E4M3[stored] if weight.dtype == "float8_e4m3fn" else stored
        if weight.order is not None:
            found["input_order"] = weight.order
        return dequantize(found, weight.format)

    return DecodedTensor(weight.name, weight.shape, np.dtype(np.float32), rows)


def regrouped(weight: QuantizedTensor, part: PartName, columns: int, fitted: int | None) -> Source:
    """Scales or zero points [*lead, out, columns] of groups of `fitted` inputs, which may be smaller than the weight's;
    zeros for zero points that it does not have."""
    source = weight.parts.get(part)
    shape = (*weight.shape[:-1], columns)
    if source is None:  # a symmetric weight in one kernel with others

        def zeros(reader: TensorReader, start: int, stop: int) -> Array:
            return np.zeros((stop - start, columns), np.int8)

        return DecodedTensor(f"{weight.name}::{part}", shape, np.dtype(np.int8), zeros)
    assert isinstance(source, DecodedTensor)
    stored = source.shape[-1]
    if stored == columns:
        return source
    width = weight.scale_width or weight.group_size or weight.shape[-1]
    places = np.arange(columns) * (fitted or 0) // width
    decode = source.rows

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        return decode(reader, start, stop)[:, places]

    return DecodedTensor(source.name, shape, source.dtype, rows)


def largest_scale(name: str, scales: list[Source]) -> DecodedTensor:
    """The largest of the static scales of the weights that share an input."""

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        found: Iterator[Array] = (_whole(one, reader) for one in scales)
        return np.max(np.stack([np.asarray(one, np.float32).reshape(1, 1) for one in found]), axis=0)

    return DecodedTensor(name, (1,), np.dtype(np.float32), rows)


def _whole(source: Source, reader: TensorReader) -> Array:
    """All rows [rows, last]."""
    if isinstance(source, DecodedTensor):
        return source.rows(reader, 0, source.num_rows)
    rows = source.size // source.shape[-1] if source.shape else 1
    return raw_rows(reader, source, 0, rows)


def _rows(source: Source, reader: TensorReader, start: int, stop: int) -> Array:
    """Rows [stop - start, last]."""
    if isinstance(source, DecodedTensor):
        return source.rows(reader, start, stop)
    return raw_rows(reader, source, start, stop)
