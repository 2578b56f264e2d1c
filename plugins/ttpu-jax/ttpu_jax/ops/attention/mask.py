"""The static mask of the splash kernel: a band around the diagonal. It tells the kernel's tables which blocks are
masked fully, partly or not at all, and masks scores inside a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

ALL, NONE, SOME = np.array([[True]]), np.array([[False]]), np.array([[True, False]])


class Band(splash_attention_mask.Mask):
    """A query attends to the tokens from `behind` before it to `ahead` after it. None means no limit.

    The library's own masks compute every element of every block to classify the block: 19 s for a window in 32k
    tokens. The corners of a block decide for a band, so that `self[rows, columns]` returns ALL, NONE or SOME instead
    of the block's elements."""

    def __init__(self, length: int, behind: int | None, ahead: int | None) -> None:
        self.length, self.behind, self.ahead = length, behind, ahead
        if behind is not None or ahead is not None:  # the kernel tests with hasattr whether there is a mask
            self.q_sequence = np.arange(length, dtype=np.int32)
            self.mask_function = self.visible

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.length, self.length

    def visible(self, queries: Any, keys: Any) -> Any:
        """Which keys a query attends to, by positions in the sequence: arrays of one shape in, a bool array of the
        same shape out."""
        if self.behind is None:
            return queries + self.ahead >= keys if self.ahead else queries >= keys
        near = queries - keys <= self.behind
        if self.ahead is None:
            return near
        return near & (queries + self.ahead >= keys if self.ahead else queries >= keys)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        rows, columns = block
        farthest, nearest = rows.stop - 1 - columns.start, rows.start - (columns.stop - 1)  # query minus key
        behind = self.length if self.behind is None else self.behind
        ahead = self.length if self.ahead is None else self.ahead
        if nearest > behind or farthest < -ahead:
            return NONE
        return ALL if farthest <= behind and nearest >= -ahead else SOME

    def _identity(self) -> tuple[Any, ...]:
        return type(self), self.length, self.behind, self.ahead

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Band) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())
