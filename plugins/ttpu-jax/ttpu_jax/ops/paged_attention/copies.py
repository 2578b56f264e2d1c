"""Copies of blocks of pages from HBM into buffers, inside a kernel, while what other buffers hold is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class PageCopies:
    """Copies of the pages of one block of keys, and of what else is kept by pages, into one of two buffers.

    Args:
        sources: references in HBM, [pages, ...] each.
        targets: references in VMEM, [buffers, pages of a block, ...] each.
        ready: a semaphore for each of the buffers.
        table: the block table in scalar memory, [pieces, pages].
    """

    def __init__(self, sources: Sequence[Any], targets: Sequence[Any], ready: Any, table: Any) -> None:
        self.sources, self.targets = tuple(sources), tuple(targets)
        self.ready, self.table = ready, table

    def start(self, piece: Any, block: Any, used: Any, slot: Any) -> None:
        """Begin to copy a block of a piece that has `used` pages."""
        number = self.targets[0].shape[1]
        full = used >= (block + 1) * number

        @pl.when(full)
        def start_all() -> None:
            for index in range(number):
                for copy in self._page(piece, block * number + index, slot, index):
                    copy.start()

        @pl.when(jnp.logical_not(full))
        def start_some() -> None:
            def one(index: Any, _: None) -> None:
                for copy in self._page(piece, block * number + index, slot, index):
                    copy.start()

            jax.lax.fori_loop(0, used - block * number, one, None)

    def wait(self, block: Any, used: Any, slot: Any) -> None:
        """Wait for what `start` began."""
        number = self.targets[0].shape[1]
        full = used >= (block + 1) * number

        @pl.when(full)
        def wait_for_all() -> None:
            for target in self.targets:  # a semaphore counts bytes, wherever they came from
                pltpu.make_async_copy(target.at[slot], target.at[slot], self.ready.at[slot]).wait()

        @pl.when(jnp.logical_not(full))
        def wait_for_some() -> None:
            def one(index: Any, _: None) -> None:
                for target in self.targets:
                    page = target.at[slot, index]
                    pltpu.make_async_copy(page, page, self.ready.at[slot]).wait()

            jax.lax.fori_loop(0, used - block * number, one, None)

    def _page(self, piece: Any, column: Any, slot: Any, index: Any) -> list[Any]:
        page = self.table[piece, column]
        return [
            pltpu.make_async_copy(source.at[page], target.at[slot, index], self.ready.at[slot])
            for source, target in zip(self.sources, self.targets, strict=True)
        ]
