"""Byte ranges of a checkpoint that make up a box of a parameter. `pieces` splits the box into pieces of single
checkpoint tensors, and `ranges` lists the contiguous element ranges of a piece, so that a process reads only what
it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ttpu_core.mapping import Concat, Expression, Padded, Stack, Tensor
from ttpu_core.mapping.padding import Box
from ttpu_core.mapping.strides import Layout


@dataclass(frozen=True)
class Piece:
    """A box of a parameter whose elements lie in one checkpoint tensor. `layout` has the box's dimensions and gives
    element positions in the tensor."""

    tensor: str
    box: Box
    layout: Layout

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.layout.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions by descending stride in the tensor: the order in which sequential reading visits them."""
        shape, strides = self.layout.shape, self.layout.strides
        return tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -abs(strides[axis]))))

    def split(self, most: int) -> Iterator[Piece]:
        """Pieces of at most `most` elements, split along the dimension with the largest stride."""
        axis = next((axis for axis in self.order if self.layout.shape[axis] > 1), None)
        if self.size <= most or axis is None:
            yield self
            return
        dim = self.layout.shape[axis]
        step = max(1, most * dim // self.size)
        for start in range(0, dim, step):
            inside = tuple((0, size) for size in self.layout.shape)
            inside = (*inside[:axis], (start, min(dim, start + step)), *inside[axis + 1 :])
            yield from self.part(inside).split(most)

    def part(self, inside: Box) -> Piece:
        """A box of this piece. `inside` is relative to the piece's first element."""
        box = tuple((low + start, low + stop) for (low, _), (start, stop) in zip(self.box, inside, strict=True))
        return Piece(self.tensor, box, self.layout.take([slice(*each) for each in inside]))


def pieces(expression: Expression, box: Box) -> Iterator[Piece]:
    """The pieces that make up a box of the expression's result. Elements in no piece are padding and equal zero."""
    if any(start >= stop for start, stop in box):
        return
    if isinstance(expression, Tensor):
        yield Piece(expression.name, box, expression.layout.take([slice(*each) for each in box]))
    elif isinstance(expression, Padded):
        for target, source in expression.padding.boxes():
            shared = intersection(box, target)
            if shared is not None:
                inside = tuple(
                    (low + start - corner, low + stop - corner)
                    for (start, stop), (corner, _), (low, _) in zip(shared, target, source, strict=True)
                )
                for piece in pieces(expression.part, inside):
                    yield Piece(piece.tensor, _moved(piece.box, source, target), piece.layout)
    elif isinstance(expression, Concat):
        yield from _of_concat(expression, box)
    else:
        yield from _of_stack(expression, box)


@dataclass(frozen=True)
class Runs:
    """Contiguous element runs of a piece. There is one run per index of `outer`, whose sizes are those of the first
    dimensions of `Piece.order`. The other dimensions lie inside a run of `length` elements, of which every
    `step`-th belongs to the piece."""

    outer: tuple[int, ...]
    length: int
    step: int = 1


def runs_of(piece: Piece) -> Runs:
    """The longest contiguous runs of a piece. With a step above 1, the elements in between are read and dropped: the
    only case in which a process reads more than it holds."""
    shape = [piece.layout.shape[axis] for axis in piece.order]
    strides = [piece.layout.strides[axis] for axis in piece.order]
    if shape and shape[-1] > 1 and strides[-1] > 1:
        return Runs(tuple(shape[:-1]), (shape[-1] - 1) * strides[-1] + 1, strides[-1])
    length, inner = 1, len(shape)
    while inner and (shape[inner - 1] == 1 or strides[inner - 1] == length):
        inner -= 1
        length *= shape[inner]
    return Runs(tuple(shape[:inner]), length)


def ranges(piece: Piece) -> Iterator[tuple[int, int]]:
    """(first element, count) of each run, in the order of `Piece.order`."""
    runs = runs_of(piece)
    strides = (piece.layout.strides[axis] for axis in piece.order)
    yield from ((start, runs.length) for start in offsets(runs.outer, strides, piece.layout.offset))


def offsets(shape: Iterable[int], strides: Iterable[int], first: int = 0) -> Iterator[int]:
    """Positions of a view's elements in row-major order. Strides beyond the number of dimensions are ignored."""
    turns = [[number * stride for number in range(dim)] for dim, stride in zip(shape, strides, strict=False)]
    for turn in product(*turns):
        yield first + sum(turn)


def intersection(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def _of_concat(expression: Concat, box: Box) -> Iterator[Piece]:
    axis, begin = expression.axis, 0
    low, high = box[axis]
    for part in expression.parts:
        end = begin + part.result_shape[axis]
        start, stop = max(low, begin), min(high, end)
        if start < stop:
            inside = (*box[:axis], (start - begin, stop - begin), *box[axis + 1 :])
            for piece in pieces(part, inside):
                first, last = piece.box[axis]
                moved = (*piece.box[:axis], (first + begin, last + begin), *piece.box[axis + 1 :])
                yield Piece(piece.tensor, moved, piece.layout)
        begin = end


def _of_stack(expression: Stack, box: Box) -> Iterator[Piece]:
    axis = expression.axis
    inside = (*box[:axis], *box[axis + 1 :])
    for number in range(*box[axis]):
        for piece in pieces(expression.parts[number], inside):
            layout = piece.layout
            shape = (*layout.shape[:axis], 1, *layout.shape[axis:])
            strides = (*layout.strides[:axis], 0, *layout.strides[axis:])
            placed = (*piece.box[:axis], (number, number + 1), *piece.box[axis:])
            yield Piece(piece.tensor, placed, Layout(shape, strides, layout.offset))


def _moved(box: Box, source: Box, target: Box) -> Box:
    """The box moved by the distance from `source` to `target`."""
    return tuple(
        (start + there - here, stop + there - here)
        for (start, stop), (here, _), (there, _) in zip(box, source, target, strict=True)
    )

