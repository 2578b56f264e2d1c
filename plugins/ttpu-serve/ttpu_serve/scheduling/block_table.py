"""Block tables: which pages hold each running sequence's keys and values, for every group of layers. In: slots, token
counts and page hashes; out: persistent int32 tables, one row per slot, that batches are gathered from."""

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

    num_pages: with `NULL_PAGE`.
    window: a token sees that many positions, its own included; None is all.
    chunk: a token sees those of its own chunk of so many positions; None is all.
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
        """Positions that one token may see; None is all."""
        return self.chunk if self.window is None else self.window

    def first_seen(self, position: Positions) -> Positions:
        """The first position that the token at `position` sees, or less than 0; what lies before is not read again."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return position * 0 if self.window is None else position - (self.window - 1)


def page_groups(runner: ModelRunner) -> tuple[PageGroup, ...]:
    """The groups of a runner whose pages are made."""
    return tuple(
        PageGroup(group.name, pages, group.window, group.chunk)
        for group, pages in zip(runner.page_groups, runner.num_pages, strict=True)
    )


class BlockTables:
    """Rows of `tables` belong to slots; entry i of a row names the page of positions i * page_size and on, `NULL_PAGE`
    where there is none yet, or it lay behind the group's window and was given back.

    tables: per group int32 [max_num_seqs, pages_per_seq]; changed in place, so copy what a step needs.
    registered: int32 [max_num_seqs], pages of each slot that can be found by their hash, or were looked at.
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
        """Pages that `tokens` positions from 0 on take."""
        return -(-tokens // self.page_size)

    def blocks_needed(self, group: int, tokens: int, whole: bool) -> int:
        """The fewest pages with which one sequence of `tokens` positions can always go on: all of them in a group that
        sees all, or where prompts are computed in one step (`whole`); otherwise those that one token can see."""
        span = self.groups[group].span
        blocks = self.blocks(tokens)
        return blocks if span is None or whole else min(blocks, (span + self.page_size - 2) // self.page_size + 1)

    def _first_block(self, group: int, position: int) -> int:
        return max(self.groups[group].first_seen(position), 0) // self.page_size

    # prefixes

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the first pages of `hashes` are cached as far as the token after them needs: all of them in
        groups that see all, those that it sees in the others."""
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
        """Entry i: how many pages right before page i are cached without a gap."""
        cached, runs = self.pools[group].cached, [0]
        for digest in hashes:
            runs.append(runs[-1] + 1 if digest in cached else 0)
        return runs

    def fits(self, hashes: Sequence[bytes], tokens: int, headroom: Sequence[int], whole: bool) -> bool:
        """Whether a sequence of `tokens` known tokens, whose first pages are cached under `hashes`, can be admitted so
        that `headroom` pages per group stay available."""
        for index, pool in enumerate(self.pools):
            first = self._first_block(index, len(hashes) * self.page_size)
            idle = sum(pool.refs[pool.cached[digest]] == 0 for digest in hashes[first:])
            needed = min(self.blocks(tokens) - first, self.blocks_needed(index, tokens, whole))
            if pool.available - idle - (needed - (len(hashes) - first)) < headroom[index]:
                return False
        return True

    def admit(self, slot: int, hashes: Sequence[bytes], tokens: int) -> None:
        """Gives an empty row the cached pages of `hashes`, and in groups that see all, pages for `tokens`."""
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
        """Lets the row's first `pages` be found by `hashes`; the device has been told to write all that is in them."""
        start = int(self.registered[slot])
        for pool, table in zip(self.pools, self.tables, strict=True):
            for entry, digest in zip(table[slot, start:pages].tolist(), hashes[start:pages], strict=True):
                if entry != NULL_PAGE:
                    pool.register(entry, digest)
        self.registered[slot] = pages

    def register_next(self, slots: np.ndarray, digests: Sequence[bytes]) -> None:
        """`register` of many rows at once, each with one page more than it had."""
        places = self.registered[slots]
        for pool, table in zip(self.pools, self.tables, strict=True):
            for entry, digest in zip(table[slots, places].tolist(), digests, strict=True):
                if entry != NULL_PAGE:
                    pool.register(entry, digest)
        self.registered[slots] += 1

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        for pool in self.pools:
            pool.reset()

    # growth and return

    def lacking(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices of the `slots` that have no page for `positions` in some group."""
        if not self.groups:
            return np.zeros(0, np.int64)
        blocks = positions // self.page_size
        short = blocks >= self._end[0][slots]
        for end in self._end[1:]:
            short |= blocks >= end[slots]
        return short.nonzero()[0]

    def capacity(self, slot: int, spare: Sequence[int] | None = None) -> int:
        """Positions from 0 on that the row could hold with all pages that are available, less `spare` per group."""
        room = self.pages_per_seq
        for index, pool in enumerate(self.pools):
            free = max(pool.available - (spare[index] if spare else 0), 0)
            room = min(room, int(self._end[index][slot]) + free)
        return room * self.page_size

    def extend(self, slot: int, tokens: int) -> None:
        """Gives the row pages for `tokens` positions; the caller has looked at `capacity`."""
        blocks = self.blocks(tokens)
        for index in range(len(self.groups)):
            self._extend(index, slot, blocks)

    def extend_by_one(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """`extend` of many rows at once, each by the page of its next position at most; there are enough pages."""
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
        """Gives back the pages that tokens from `positions` on see no more."""
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
        """Gives back all pages of the row; a prefix is forgotten from its end."""
        for index, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            entries = table[slot, self._first[index][slot] : self._end[index][slot]]
            pool.release(entries[::-1].tolist())
            entries[:] = NULL_PAGE
            self._first[index][slot] = self._end[index][slot] = 0
        self.registered[slot] = 0

    # counts

    @property
    def pages_in_use(self) -> tuple[int, ...]:
        """Pages that running sequences hold, per group."""
        return tuple(pool.in_use for pool in self.pools)

    @property
    def pages_total(self) -> tuple[int, ...]:
        """Pages that sequences can hold, per group."""
        return tuple(pool.num_pages - 1 for pool in self.pools)

    @property
    def pages_cached(self) -> tuple[int, ...]:
        """Pages that can be found by their hash, in use or not, per group."""
        return tuple(len(pool.cached) for pool in self.pools)
