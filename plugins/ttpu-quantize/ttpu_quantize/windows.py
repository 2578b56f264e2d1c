"""Cuts the tokens of a text into overlapping windows, so that each token is predicted once, from as many tokens before
it as the windows allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ttpu_core.errors import RequestError


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop) of a text, of which those from `first` on are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Batch:
    """Windows as arrays.

    Attributes:
        tokens: int32 [batch, size], padded on the right with zeros.
        lengths: int32 [batch], the number of real tokens in each row; 1 in a row that only fills the batch.
        targets: int32 [batch, size], the token after each.
        scored: bool [batch, size], whether the target counts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    scored: np.ndarray


def windows(count: int, size: int, stride: int) -> list[Window]:
    """The windows of a text of `count` tokens.

    Window k starts at token k * stride and has `size` tokens, or fewer at the end of the text. It scores the tokens
    that no earlier window scored, so that every token but the text's first is scored once, and from the second window
    on with at least size - stride tokens before it.

    Raises:
        RequestError: fewer than two tokens, a window below 2, or a stride outside [1, size - 1].
    """
    if count < 2:
        raise RequestError(f"the text has {count} tokens, but at least 2 are needed to predict one: use a longer text.")
    if size < 2:
        raise RequestError(f"windows of {size} tokens were asked for, but at least 2 are needed: raise --window.")
    if not 1 <= stride < size:
        raise RequestError(
            f"a stride of {stride} tokens was asked for, but windows of {size} tokens move by 1 to {size - 1}: correct "
            "--stride, or leave it out for half a window."
        )
    found = [Window(0, min(size, count), 1)]
    while found[-1].stop < count:
        before = found[-1]
        start = before.start + stride
        found.append(Window(start, min(start + size, count), before.stop))
    return found


def batches(tokens: Sequence[int], cut: Sequence[Window], size: int, rows: int) -> Iterator[Batch]:
    """Batches of `rows` windows of `size` tokens each; the last one is filled with rows in which nothing is scored."""
    text = np.asarray(tokens, np.int32)
    for begin in range(0, len(cut), rows):
        shape = (rows, size)
        ids, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        batch = Batch(ids, np.ones(rows, np.int32), targets, np.zeros(shape, np.bool_))
        for row, window in enumerate(cut[begin : begin + rows]):
            length = window.stop - window.start
            batch.tokens[row, :length] = text[window.start : window.stop]
            batch.lengths[row] = length
            batch.targets[row, : length - 1] = text[window.start + 1 : window.stop]
            batch.scored[row, window.first - 1 - window.start : length - 1] = True
        yield batch
