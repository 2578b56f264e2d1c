"""Strides of a view of a checkpoint tensor, computed from shapes alone. `Layout` says where a view's elements lie in
the tensor's memory; `covers_once` tells whether several views use every element of the tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod


@dataclass(frozen=True)
class Layout:
    """A strided view, as numpy defines it: element (i, j, ...) lies at `offset` + i * strides[0] + j * strides[1] +
    ... Offset and strides count elements, not bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], offset: int = 0) -> Layout:
        """A whole tensor in row-major order."""
        return cls(shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))), offset)

    def reshape(self, shape: tuple[int, ...]) -> Layout | None:
        """The same elements in another shape, or None if only a copy could have that shape."""
        if 0 in shape:
            return Layout.contiguous(shape, self.offset)
        dims = iter(shape)
        strides: list[int] = []
        for count, stride in self._runs():
            left = count
            while left > 1:
                dim = next(dims)
                if left % dim:
                    return None
                left //= dim
                strides.append(left * stride)
        strides.extend(1 for _ in dims)  # what remains are dimensions of size 1, which are never stepped along
        return Layout(shape, tuple(strides), self.offset)

    def transpose(self, order: Sequence[int]) -> Layout:
        """The view with its dimensions permuted."""
        return Layout(tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order), self.offset)

    def take(self, parts: Sequence[int | slice]) -> Layout:
        """A part of the view: an index drops its dimension, a slice keeps it."""
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        for part, dim, stride in zip(parts, self.shape, self.strides, strict=False):
            if isinstance(part, int):
                offset += (part % dim) * stride
            else:
                taken = range(dim)[part]
                offset += taken.start * stride if taken else 0
                shape.append(len(taken))
                strides.append(taken.step * stride)
        rest = len(parts)
        return Layout((*shape, *self.shape[rest:]), (*strides, *self.strides[rest:]), offset)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(size, stride) of the dimensions. Neighbouring dimensions that together form one regular stride are
        merged."""
        pending: tuple[int, int] | None = None
        for dim, stride in zip(self.shape, self.strides, strict=True):
            if dim == 1:
                continue
            if pending is not None and pending[1] == dim * stride:
                pending = (pending[0] * dim, stride)
            else:
                if pending is not None:
                    yield pending
                pending = (dim, stride)
        if pending is not None:
            yield pending


def covers_once(size: int, layouts: Iterable[Layout]) -> bool:
    """Whether the views use each of a tensor's `size` elements exactly once.

    The test is exact. For regular slices its cost does not grow with the size: a repeated pattern is checked for one
    period only."""
    parts = [_Lattice.of(layout) for layout in layouts if prod(layout.shape)]
    return sum(part.count for part in parts) == size and _tiles(parts, size)


@dataclass(frozen=True)
class _Lattice:
    """The set offset + sum of k * stride for 0 <= k < n. `steps` holds the pairs (stride, n), strides positive and
    in descending order."""

    offset: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Layout) -> _Lattice:
        offset, steps = layout.offset, []
        for dim, stride in zip(layout.shape, layout.strides, strict=True):
            if dim > 1:
                offset += min(0, stride * (dim - 1))
                steps.append((abs(stride), dim))
        return cls(offset, _merge(sorted(steps, reverse=True)))

    @property
    def count(self) -> int:
        return prod(n for _, n in self.steps)

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + sum(stride * (n - 1) for stride, n in self.steps) + 1


def _merge(steps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for stride, n in steps:
        if merged and merged[-1][0] == stride * n:
            merged[-1] = (stride, n * merged[-1][1])
        elif n > 1:
            merged.append((stride, n))
    return tuple(merged)


def _tiles(parts: list[_Lattice], size: int) -> bool:
    """Whether the parts together fill range(size). The parts have `size` elements in all, and none repeats an
    element of its own."""
    start = 0
    pending = sorted(parts, key=lambda part: part.offset, reverse=True)
    while pending:
        together = [pending.pop()]  # the parts whose extents overlap must fill their common extent by themselves
        first, end = together[0].offset, together[0].end
        while pending and pending[-1].offset < end:
            together.append(pending.pop())
            end = max(end, together[-1].end)
        if first != start or sum(part.count for part in together) != end - start:
            return False
        shifted = [_Lattice(part.offset - start, part.steps) for part in together]
        if len(together) > 1 and not _interleaved(shifted, end - start):
            return False
        start = end
    return start == size


def _interleaved(parts: list[_Lattice], size: int) -> bool:
    inner = gcd(size, *(part.offset for part in parts), *(length for part in parts for length in _lengths(part)))
    if inner > 1:  # every part consists of runs of `inner` elements: count runs instead of elements
        return _tiles([_shrunk(part, inner) for part in parts], size // inner)
    period = max((part.steps[0][0] for part in parts if part.steps), default=size)
    turns = [_one_turn(part, period, size) for part in parts]
    if all(turns):  # every part repeats with this period: check the first period only
        return _tiles([turn for turn in turns if turn], period)
    seen = bytearray(size)
    for part in parts:
        *outer, (stride, n) = part.steps or ((1, 1),)
        for offsets in product(*(range(0, s * k, s) for s, k in outer)):
            start = part.offset + sum(offsets)
            run = slice(start, start + stride * (n - 1) + 1, stride)
            if any(seen[run]):
                return False
            seen[run] = b"\1" * n
    return True  # the counts agree and no element is used twice


def _lengths(part: _Lattice) -> Iterator[int]:
    """The length of the part's innermost contiguous run, and its strides."""
    contiguous = part.steps[-1][1] if part.steps and part.steps[-1][0] == 1 else 1
    yield contiguous
    yield from (stride for stride, _ in part.steps if stride > 1)


def _shrunk(part: _Lattice, inner: int) -> _Lattice:
    steps = [(stride // inner, n) if stride > 1 else (1, n // inner) for stride, n in part.steps]
    return _Lattice(part.offset // inner, _merge(steps))


def _one_turn(part: _Lattice, period: int, size: int) -> _Lattice | None:
    """The part within one period, or None if it does not repeat with that period over the whole size."""
    if not part.steps or part.offset >= period:
        return None
    (stride, n), *rest = part.steps
    if period % stride or n * stride != size or size % period:
        return None
    return _Lattice(part.offset, _merge([(stride, period // stride), *rest]))
