"""The static mask of the splash kernel: a band around the diagonal. In: how far a query sees; out: what the kernel's
tables need to know of each block, and the function that masks scores inside one."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

ALL, NONE, SOME = np.array([[True]]), np.array([[False]]), np.array([[True, False]])


class Band(splash_attention_mask.Mask):
    """A query sees the tokens from `behind` before it to `ahead` after it; None is without limit.

    The library's own masks compute every element of every block to learn whether it is visible in whole, in part or
    not at all: 19 s for a window in 32k tokens. A block of a band is known by its corners, so that `self[rows,
    columns]` is not its elements but one of ALL, NONE and SOME."""

    def __init__(self, length: int, behind: int | None, ahead: int | None) -> None:
        self.length, self.behind, self.ahead = length, behind, ahead
        if behind is not None or ahead is not None:  # the kernel asks by hasattr whether there is anything to mask
            self.q_sequence = np.arange(length, dtype=np.int32)
            self.mask_function = self.visible

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.length, self.length

    def visible(self, queries: Any, keys: Any) -> Any:
        """Which keys a query sees, by their places in the sequence: arrays of one shape in, bool out."""
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
