"""Block tables: the pages that hold each running sequence's keys and values, for every group of layers. They are
persistent int32 tables with one row per slot, from which steps gather their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.runner import NULL_PAGE, ModelRunner
from ttpu_serve.scheduling.block_pool import BlockPool

Positions = TypeVar("Positions", int, np.ndarray)


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a pool of pages and a block table.

    num_pages: pages including `NULL_PAGE`.
    window: positions that a token sees, including its own; None is all.
    chunk: a token sees the positions of its own chunk of this size; None is all.

    Raises:
        RequestError: there are fewer than 2 pages, a window and a chunk, or one that is less than 1.
    """

    name: str
    num_pages: int
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise RequestError(
                f"page group {self.name!r} has {self.num_pages} pages, but one is kept for padding: give it 2 or more."
            )
        if self.window is not None and self.chunk is not None:
            raise RequestError(f"page group {self.name!r} has a window and a chunk, but a layer has one: name one.")
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise RequestError(f"page group {self.name!r} has {name} {value}: it must be 1 or more, or None.")

    @property
    def span(self) -> int | None:
        """Maximum positions that one token sees; None is all."""
        return self.chunk if self.window is None else self.window

    def first_seen(self, position: Positions) -> Positions:
        """Return the first position that the token at `position` sees; it may be negative. Earlier positions are not
        read again."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position * 0 if self.window is None else position - (self.window - 1)


def page_groups(runner: ModelRunner) -> tuple[PageGroup, ...]:
    """Return the page groups of a runner whose pages are allocated."""
    return tuple(
        PageGroup(group.name, pages, group.window, group.chunk)
        for group, pages in zip(runner.page_groups, runner.num_pages, strict=True)
    )


class BlockTables:
    """The block tables of all groups. Rows belong to slots. Entry i of a row is the page of the positions from i *
    page_size, or `NULL_PAGE` if it has no page yet or the page fell behind the group's window and was released.

    tables: per group int32 [max_num_seqs, pages_per_seq]. They change in place, so copy what a step needs.
    registered: int32 [max_num_seqs], leading pages per slot that were registered in, or taken from, the prefix cache.
    """

    def __init__(self, groups: Sequence[PageGroup], max_num_seqs: int, max_model_len: int, page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.pages_per_seq = self.blocks(max_model_len)
        self.pools = tuple(BlockPool(group.num_pages) for group in self.groups)
        self.tables = tuple(np.full((max_num_seqs, self.pages_per_seq), NULL_PAGE, np.int32) for _ in self.groups)
        self.registered = np.zeros(max_num_seqs, np.int32)
        self._first = tuple(np.zeros(max_num_seqs, np.int32) for _ in self.groups)  # the first entry that is there
        self._end = tuple(np.zeros(max_num_seqs, np.int32) for _ in self.groups)  # one past the last
        self._limited = [index for index, group in enumerate(self.groups) if group.span is not None]

    def blocks(self, tokens: int) -> int:
        """Return the number of pages for `tokens` positions."""
        return -(-tokens // self.page_size)

    def blocks_needed(self, group: int, tokens: int, whole: bool) -> int:
        """Return the minimum pages with which one sequence of `tokens` positions can always continue: all of them in
        groups with full attention or if prompts are computed in one step (`whole`), otherwise those that one token
        sees."""
        span = self.groups[group].span
        blocks = self.blocks(tokens)
        return blocks if span is None or whole else min(blocks, (span + self.page_size - 2) // self.page_size + 1)

    def _first_block(self, group: int, position: int) -> int:
        return max(self.groups[group].first_seen(position), 0) // self.page_size

    # prefixes

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first pages of `hashes` can be reused: all of them must be cached in groups with full
        attention, and those that the next token sees in the other groups."""
        pages = len(hashes) if self.groups else 0
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.span is None:
                pages = next((page for page in range(pages) if hashes[page] not in pool.cached), pages)
        runs = [self._runs(index, hashes[:pages]) for index in self._limited]
        while pages and any(
            run[pages] < pages - self._first_block(index, pages * self.page_size)
            for index, run in zip(self._limited, runs, strict=True)
        ):
            pages -= 1
        return pages

    def _runs(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Return in entry i how many consecutive pages before page i are cached."""
        cached, runs = self.pools[group].cached, [0]
        for digest in hashes:
            runs.append(runs[-1] + 1 if digest in cached else 0)
        return runs

    def fits(self, hashes: Sequence[bytes], tokens: int, headroom: Sequence[int], whole: bool) -> bool:
        """Whether a sequence of `tokens` known tokens, whose first pages are cached under `hashes`, can be admitted
        with `headroom` pages per group left available."""
        for index, pool in enumerate(self.pools):
            first = self._first_block(index, len(hashes) * self.page_size)
            idle = sum(pool.refs[pool.cached[digest]] == 0 for digest in hashes[first:])
            needed = min(self.blocks(tokens) - first, self.blocks_needed(index, tokens, whole))
            if pool.available - idle - (needed - (len(hashes) - first)) < headroom[index]:
                return False
        return True

    def admit(self, slot: int, hashes: Sequence[bytes], tokens: int) -> None:
        """Give an empty row the cached pages of `hashes`, and, in groups with full attention, pages for `tokens`
        positions."""
        for index, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            first = self._first_block(index, len(hashes) * self.page_size)
            for page in range(first, len(hashes)):
                shared = pool.cached[hashes[page]]
                pool.share(shared)
                table[slot, page] = shared
            self._first[index][slot] = first
            self._end[index][slot] = len(hashes)
        self.registered[slot] = len(hashes)
        for index, group in enumerate(self.groups):
            if group.span is None:
                self._extend(index, slot, self.blocks(tokens))

    def register(self, slot: int, hashes: Sequence[bytes], pages: int) -> None:
        """Cache the row's first `pages` pages under `hashes`. Steps that write them completely have been dispatched."""
        start = int(self.registered[slot])
        for pool, table in zip(self.pools, self.tables, strict=True):
            for entry, digest in zip(table[slot, start:pages].tolist(), hashes[start:pages], strict=True):
                if entry != NULL_PAGE:
                    pool.register(entry, digest)
        self.registered[slot] = pages

    def register_next(self, slots: np.ndarray, digests: Sequence[bytes]) -> None:
        """Register one more page of each of `slots`, int32 [n], under its digest."""
        places = self.registered[slots]
        for pool, table in zip(self.pools, self.tables, strict=True):
            for entry, digest in zip(table[slots, places].tolist(), digests, strict=True):
                if entry != NULL_PAGE:
                    pool.register(entry, digest)
        self.registered[slots] += 1

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        for pool in self.pools:
            pool.reset()

    # growth and return

    def lacking(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the indices [m] of sequences that lack a page in some group, for `slots` [n] and `positions` [n]."""
        if not self.groups:
            return np.zeros(0, np.int64)
        blocks = positions // self.page_size
        short = blocks >= self._end[0][slots]
        for end in self._end[1:]:
            short |= blocks >= end[slots]
        return short.nonzero()[0]

    def capacity(self, slot: int, spare: Sequence[int] | None = None) -> int:
        """Return the positions that the row could hold with all available pages except `spare` per group."""
        room = self.pages_per_seq
        for index, pool in enumerate(self.pools):
            free = max(pool.available - (spare[index] if spare else 0), 0)
            room = min(room, int(self._end[index][slot]) + free)
        return room * self.page_size

    def extend(self, slot: int, tokens: int) -> None:
        """Give the row pages for `tokens` positions. The caller has checked `capacity`."""
        blocks = self.blocks(tokens)
        for index in range(len(self.groups)):
            self._extend(index, slot, blocks)

    def extend_by_one(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Give each of `slots`, int32 [n], the page of its next position `positions`, int32 [n], if it lacks one.
        Enough pages must be available."""
        blocks = positions // self.page_size
        for pool, table, ends in zip(self.pools, self.tables, self._end, strict=True):
            short = slots[blocks >= ends[slots]]
            table[short, ends[short]] = pool.take(len(short))
            ends[short] += 1

    def _extend(self, group: int, slot: int, blocks: int) -> None:
        end = int(self._end[group][slot])
        if blocks > end:
            self.tables[group][slot, end:blocks] = self.pools[group].take(blocks - end)
            self._end[group][slot] = blocks

    def trim(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Release the pages of `slots`, int32 [n], that tokens from `positions`, int32 [n], no longer see."""
        for index in self._limited:
            first = self.groups[index].first_seen(positions) // self.page_size
            for row in (first > self._first[index][slots]).nonzero()[0].tolist():
                self._drop(index, int(slots[row]), int(first[row]))

    def _drop(self, group: int, slot: int, first: int) -> None:
        entries = self.tables[group][slot, self._first[group][slot] : first]
        self.pools[group].release(entries.tolist())
        entries[:] = NULL_PAGE
        self._first[group][slot] = first

    def release(self, slot: int) -> None:
        """Release all pages of the row; the end of its prefix is evicted first."""
        for index, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            entries = table[slot, self._first[index][slot] : self._end[index][slot]]
            pool.release(entries[::-1].tolist())
            entries[:] = NULL_PAGE
            self._first[index][slot] = self._end[index][slot] = 0
        self.registered[slot] = 0

    # counts

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages per group that running sequences hold."""
        return tuple(pool.in_use for pool in self.pools)

    @property
    def pages_total(self) -> tuple[int, ...]:
        """Pages per group that sequences can hold."""
        return tuple(pool.num_pages - 1 for pool in self.pools)

    @property
    def pages_cached(self) -> tuple[int, ...]:
        """Pages per group that are cached under a hash, whether in use or not."""
        return tuple(len(pool.cached) for pool in self.pools)
