"""Tensors that a checkpoint does not hold as they are used: packed, transposed or scaled ones. They are decoded a few
rows at a time, so that the host never holds a decoded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.header import TensorInfo, TensorReader

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

ReadRows = Callable[[TensorReader, int, int], "Array"]

RAW: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "F4": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
}
"""numpy dtypes by safetensors' names; unsigned integers for the floats that numpy lacks."""


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor that is computed from others of a checkpoint.

    Attributes:
        name: for error messages.
        shape: of the result.
        dtype: of the result.
        rows: reader, start, stop → rows [stop - start, shape[-1]], where all dimensions but the last are merged.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: ReadRows

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return prod(self.shape[:-1])


def raw_rows(reader: TensorReader, info: TensorInfo, start: int, stop: int) -> Array:
    """Rows [stop - start, last] of a stored tensor whose other dimensions are merged, as `RAW` says."""
    width = info.shape[-1] if info.shape else 1
    rows = np.empty((stop - start, width), RAW[info.dtype])
    if rows.size:
        reader.read_into(info, rows.reshape(-1).view(np.uint8).data, start * width * rows.itemsize)
    return rows


def raw_columns(reader: TensorReader, info: TensorInfo, start: int, stop: int) -> Array:
    """Columns [rows, stop - start] of a stored matrix, as `RAW` says."""
    height, width = info.shape
    columns = np.empty((height, stop - start), RAW[info.dtype])
    size = columns.itemsize
    for number in range(height if stop > start else 0):
        reader.read_into(info, columns[number].view(np.uint8).data, (number * width + start) * size)
    return columns


def raw_tensor(reader: TensorReader, info: TensorInfo) -> Array:
    """A whole stored tensor, in its shape, as `RAW` says."""
    return raw_rows(reader, info, 0, prod(info.shape[:-1])).reshape(info.shape)
