"""Runs of tokens inside kernels that write pages: the tokens of a sequence that lie in one page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class Runs:
    """The runs of the real tokens of one step of a grid.

    Args:
        slots: of the tokens, see `RaggedBatch.slots`.
        rows: the sequence of each token; not read where `single`.
        starts: the first token of each sequence; its last entry is the number of real tokens.
        begin: the first token of the step.
        end: the end of the step's real tokens.
        block: the most tokens of a step.
        page_size: tokens per page.
        single: each sequence has one token.
    """

    slots: Any
    rows: Any
    starts: Any
    begin: Any
    end: Any
    block: int
    page_size: int
    single: bool

    def for_each(self, visit: Callable[[Any, Any, Any, Any], None]) -> None:
        """visit(first token, its slot, number of tokens, number of the run)."""

        def one(token: Any, run: Any) -> Any:
            slot: Any = self.slots[token]
            count: Any = 1
            if not self.single:
                left = self.page_size - jax.lax.rem(slot, self.page_size)
                of_sequence = self.starts[self.rows[token] + 1]
                count = jnp.minimum(jnp.minimum(of_sequence, self.end) - token, left)
            visit(token, slot, count, run)
            return count

        if self.single:
            jax.lax.fori_loop(0, self.end - self.begin, lambda run, _: one(self.begin + run, run) and None, None)
        else:
            start = self.begin, jnp.int32(0)
            jax.lax.while_loop(lambda at: at[0] < self.end, lambda at: (at[0] + one(*at), at[1] + 1), start)

    def copies(self, token: Any, slot: Any, count: Any, rows: Any, pages: Any, finished: Any) -> list[tuple[Any, Any]]:
        """The copies of a run, in sizes of powers of two, and whether each takes place.

        Args:
            token: the first of the run, whose `slot` and `count` of tokens `for_each` gives.
            rows: a reference in VMEM, [tokens of the step, ...].
            pages: a reference in HBM, [pages, page_size, ...].
            finished: the semaphore of the copies.
        """
        page, offset = jax.lax.div(slot, self.page_size), jax.lax.rem(slot, self.page_size)
        found = []
        for bit in reversed(range(1 if self.single else min(self.page_size, self.block).bit_length())):
            size = 1 << bit
            before = 0 if self.single else (count >> (bit + 1)) << (bit + 1)
            source = rows.at[pl.ds(token - self.begin + before, size)]
            target = pages.at[page, pl.ds(offset + before, size)]
            found.append((self.single or (count & size) > 0, pltpu.make_async_copy(source, target, finished)))
        return found


def when(there: Any, act: Callable[[], None]) -> None:
    """Act if `there`, a bool that may be known while a program is traced."""
    if there is True:
        act()
    else:
        pl.when(there)(act)
