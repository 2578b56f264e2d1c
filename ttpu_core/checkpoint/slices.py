"""Fills arrays with boxes of a parameter, directly from safetensors files. Only the needed bytes are read, each of
them once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.checkpoint.ranges import Piece, intersection, offsets, pieces, ranges, runs_of
from ttpu_core.mapping import Expression
from ttpu_core.mapping.padding import Box

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_BYTES = 4 * 2**20
"""Block size for data that must be converted, transposed or distributed to several arrays."""

LONG_RUN_BYTES = 64 * 2**10
"""Minimum size of a run that is read directly into its place, at the cost of one system call."""


@dataclass(frozen=True)
class StoredTensor:
    """A checkpoint tensor's location and element dtype."""

    info: TensorInfo
    dtype: np.dtype[Any]


def read_boxes(
    expression: Expression,
    parts: Mapping[Box, Array],
    tensors: Mapping[str, StoredTensor | DecodedTensor],
    reader: TensorReader,
    padding: int = 0,
) -> None:
    """Fill each array with its box of the parameter that `expression` describes. Boxes that together fill a larger box
    are read together.

    Args:
        expression: the parameter's mapping rule.
        parts: box → C-contiguous array of the box's shape, in any dtype; boxes do not overlap.
        tensors: the expression's checkpoint tensors by name.
        reader: reads the files.
        padding: the value of padding.

    Raises:
        CheckpointError: a file is unreadable, or shorter than its header says.
    """
    whole = _hull(list(parts))
    if _size(whole) == sum(map(_size, parts)):
        _read(expression, whole, parts, tensors, reader, padding)
    else:
        for box, array in parts.items():
            _read(expression, box, {box: array}, tensors, reader, padding)


def _read(
    expression: Expression,
    whole: Box,
    parts: Mapping[Box, Array],
    tensors: Mapping[str, StoredTensor | DecodedTensor],
    reader: TensorReader,
    padding: int,
) -> None:
    """Read boxes that together fill `whole`, or a single box."""
    found = list(pieces(expression, whole))
    if sum(piece.size for piece in found) < _size(whole):
        for array in parts.values():
            array.fill(padding)
    for piece in found:
        stored = tensors[piece.tensor]
        shares = [
            (box, array, shared) for box, array in parts.items() if (shared := intersection(box, piece.box)) is not None
        ]
        if isinstance(stored, DecodedTensor):
            _decode(piece, shares, stored, reader)
            continue
        together = []
        for box, array, shared in shares:
            part = piece.part(_within(shared, piece.box))
            long_runs = len(shares) == 1 or runs_of(part).length * stored.dtype.itemsize >= LONG_RUN_BYTES
            if not (long_runs and _read_in_place(part, array, box, stored, reader)):
                together.append((box, array))
        if len(together) == len(shares):
            _deal_out(piece, together, stored, reader)
        else:
            for box, array in together:
                shared = intersection(box, piece.box)
                assert shared is not None
                _deal_out(piece.part(_within(shared, piece.box)), [(box, array)], stored, reader)


def _read_in_place(part: Piece, array: Array, box: Box, stored: StoredTensor, reader: TensorReader) -> bool:
    """Read each run directly into its place in the array. False if the stored data cannot be used as it is."""
    runs = runs_of(part)
    inner = part.order[len(runs.outer) :]
    itemsize = array.dtype.itemsize
    strides = [array.strides[axis] for axis in part.order]
    expected = itemsize
    for axis in reversed(inner):
        if part.layout.shape[axis] > 1 and array.strides[axis] != expected:
            return False
        expected *= part.layout.shape[axis]
    if array.dtype != stored.dtype or runs.step != 1:
        return False
    corner = sum(
        (start - low) * stride for (start, _), (low, _), stride in zip(part.box, box, array.strides, strict=True)
    )
    memory = array.reshape(-1).view(np.uint8).data
    nbytes = runs.length * itemsize
    for (first, _), place in zip(ranges(part), offsets(runs.outer, strides, corner), strict=True):
        reader.read_into(stored.info, memory[place : place + nbytes], first * itemsize)
    return True


def _deal_out(
    piece: Piece, parts: Sequence[tuple[Box, Array]], stored: StoredTensor, reader: TensorReader
) -> None:
    """Read a piece block by block, and copy the parts of each block to the arrays that hold them."""
    itemsize = stored.dtype.itemsize
    for block in piece.split(BLOCK_BYTES // itemsize):
        runs = runs_of(block)
        buffer = np.empty((prod(runs.outer), runs.length), stored.dtype)
        memory, nbytes = buffer.reshape(-1).view(np.uint8).data, runs.length * itemsize
        for number, (first, _) in enumerate(ranges(block)):
            reader.read_into(stored.info, memory[number * nbytes : (number + 1) * nbytes], first * itemsize)
        read = buffer[:, :: runs.step].reshape([block.layout.shape[axis] for axis in block.order])
        values = read.transpose(np.argsort(block.order))
        for box, array in parts:
            shared = intersection(box, block.box)
            if shared is not None:
                array[_slices(shared, box)] = values[_slices(shared, block.box)]


def _decode(
    piece: Piece, shares: Sequence[tuple[Box, Array, Box]], stored: DecodedTensor, reader: TensorReader
) -> None:
    """Decode the rows of a piece block by block, and copy the parts of each block to the arrays that hold them."""
    width = stored.shape[-1]
    for block in piece.split(BLOCK_BYTES // stored.dtype.itemsize):
        steps = [stride * (size - 1) for size, stride in zip(block.layout.shape, block.layout.strides, strict=True)]
        first = block.layout.offset + sum(min(step, 0) for step in steps)
        last = block.layout.offset + sum(max(step, 0) for step in steps)
        start, stop = first // width, last // width + 1
        decoded = np.ascontiguousarray(stored.rows(reader, start, stop), stored.dtype).reshape(-1)
        values = np.lib.stride_tricks.as_strided(
            decoded[block.layout.offset - start * width :],
            block.layout.shape,
            [stride * decoded.itemsize for stride in block.layout.strides],
            writeable=False,
        )
        for box, array, _ in shares:
            shared = intersection(box, block.box)
            if shared is not None:
                array[_slices(shared, box)] = values[_slices(shared, block.box)]


def _hull(boxes: Sequence[Box]) -> Box:
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes, strict=True))


def _size(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _within(box: Box, other: Box) -> Box:
    """The box relative to the first element of the other."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, other, strict=True))


def _slices(box: Box, other: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in _within(box, other))
