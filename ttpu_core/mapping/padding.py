"""Padding of one parameter: which entries of the original are repeated, and where zeros are inserted. `Padding`
converts an array from the checkpoint's shape to the mesh's shape and back, bit for bit.

`ttpu_core.sharding.padding` decides how a whole architecture is padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A box inside an array: (start, stop) in each dimension."""

Run = tuple[int, int]
"""(first, count): `count` consecutive entries of the original from number `first` on. A `first` of -1 means zeros."""


@dataclass(frozen=True)
class Padding:
    """How one parameter is padded: reshape the original from `original` to `view`, take the entries that `runs`
    names along `axis`, and reshape to `shape`.

    Every entry of the original is taken at least once. `view` relates to `original` and to `shape` in the same way:
    it equals them, or merges two of their dimensions into `axis`, or splits one into `axis` and the dimension after
    it."""

    original: Shape
    shape: Shape
    view: Shape
    axis: int
    runs: tuple[Run, ...]

    @cached_property
    def index(self) -> tuple[int, ...]:
        """For each entry along the result's axis, its number in the original, or -1 for zeros."""
        return tuple(number for first, count in self.runs for number in _numbers(first, count))

    @property
    def taken(self) -> Shape:
        """The result's shape before the last reshape."""
        entries = sum(count for _, count in self.runs)
        return (*self.view[: self.axis], entries, *self.view[self.axis + 1 :])

    @property
    def has_replicas(self) -> bool:
        """Whether an entry of the original is taken more than once."""
        real = [number for number in self.index if number >= 0]
        return len(set(real)) < len(real)

    def pad(self, array: np.ndarray) -> np.ndarray:
        """Pad `array`: [*original]. The result is [*shape]."""
        import numpy as np

        index = np.asarray(self.index)
        taken = array.reshape(self.view).take(index, axis=self.axis)
        np.moveaxis(taken, self.axis, 0)[index < 0] = 0
        return taken.reshape(self.shape)

    def unpad(self, array: np.ndarray) -> np.ndarray:
        """Undo `pad` for `array`: [*shape]. The result is [*original]. The first copy of each repeated entry is
        taken; the copies are equal."""
        first = {number: place for place, number in reversed(list(enumerate(self.index)))}
        places = [first[number] for number in range(self.view[self.axis])]
        return array.reshape(self.taken).take(places, axis=self.axis).reshape(self.original)

    def project_gradient(self, array: np.ndarray) -> np.ndarray:
        """Project the gradient `array`: [*shape] of a padded parameter so that a step along it keeps the parameter
        padded. The gradients of all copies of an entry are summed, each copy gets the sum, and the gradient of
        padding is zero. The result is [*shape].

        `unpad` of the result is the gradient of the original parameter. A norm of the padded result counts each
        copy: compute norms after `unpad`."""
        import numpy as np

        along = np.moveaxis(array.reshape(self.taken), self.axis, 0)
        real = np.asarray(self.index) >= 0
        summed = np.zeros((self.view[self.axis], *along.shape[1:]), array.dtype)
        np.add.at(summed, np.asarray(self.index)[real], along[real])
        return self.pad(np.moveaxis(summed, 0, self.axis).reshape(self.original))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """The boxes of the result that hold no zeros, each with the equal box of the original."""
        place = 0
        for first, count in self.runs:
            while count:
                step = min(count, _room(self.shape, self.taken, self.axis, place))
                if first >= 0:
                    step = min(step, _room(self.original, self.view, self.axis, first))
                    yield (
                        _box(self.shape, self.taken, self.axis, place, step),
                        _box(self.original, self.view, self.axis, first, step),
                    )
                    first += step
                place += step
                count -= step


def merged_runs(runs: Iterator[Run]) -> tuple[Run, ...]:
    """Merge the entries into as few runs as possible."""
    result: list[Run] = []
    for first, count in runs:
        if count and result:
            before, length = result[-1]
            if (first < 0 and before < 0) or (first >= 0 and before >= 0 and before + length == first):
                result[-1] = before, length + count
                continue
        if count:
            result.append((first, count))
    return tuple(result)


def _numbers(first: int, count: int) -> Iterator[int]:
    return iter((-1,) * count) if first < 0 else iter(range(first, first + count))


def _row(shape: Shape, view: Shape, axis: int) -> int | None:
    """Entries per row if the view's axis merges two dimensions of `shape`, else None."""
    return shape[axis + 1] if len(shape) > len(view) else None


def _room(shape: Shape, view: Shape, axis: int, place: int) -> int:
    """Entries from `place` to the end of its row."""
    row = _row(shape, view, axis)
    return view[axis] - place if row is None else row - place % row


def _box(shape: Shape, view: Shape, axis: int, start: int, count: int) -> Box:
    """`count` entries from `start` on, which lie in one row, as a box of `shape`."""
    row, box = _row(shape, view, axis), [(0, size) for size in shape]
    if row is None:
        width = shape[axis] // view[axis]  # more than 1 if the view splits a dimension
        box[axis] = start * width, (start + count) * width
    else:
        box[axis] = start // row, start // row + 1
        box[axis + 1] = start % row, start % row + count
    return tuple(box)
