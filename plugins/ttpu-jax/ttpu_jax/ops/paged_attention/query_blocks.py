"""Blocks of queries inside a kernel: which pieces a block has queries of, which blocks of keys these see, and a walk
through them that copies the pages of the next ones while one is computed. A step of the grid computes one block of
queries. Where a device has two cores, these take turns, since later queries see more keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttpu_jax.ops.attention.blocks import TWO_CORES
from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.pieces import Pieces

_PIECE, _FIRST, _USED = range(3)
_START, _END, _AHEAD, _LENGTH = range(4)


@dataclass(frozen=True)
class QueryBlocks:
    """How a flat batch is cut into blocks of queries.

    Args:
        tokens: of the batch.
        size: tokens of a block.
        cores: of the device.
    """

    tokens: int
    size: int
    cores: int = 1

    @classmethod
    def of(cls, kind: str, tokens: int, size: int) -> QueryBlocks:
        """Those of a device of this kind (`jax.Device.device_kind`)."""
        return cls(tokens, size, 2 if kind in TWO_CORES and tokens > size else 1)

    @property
    def turns(self) -> int:
        """Blocks of each core."""
        return -(-self.tokens // (self.size * self.cores))

    @property
    def grid(self) -> tuple[int, int]:
        """Cores and their turns."""
        return self.cores, self.turns

    @property
    def padding(self) -> int:
        """Tokens that fill the last block up."""
        return self.turns * self.cores * self.size - self.tokens

    def number(self, core: Any, turn: Any) -> Any:
        """The block that a core computes in this turn."""
        return turn * self.cores + core


def scalars_of(
    blocks: QueryBlocks, pieces: Pieces, wanted: jax.Array, window: int | None, page_size: int, page_block: int
) -> tuple[jax.Array, ...]:
    """What `walk` reads from scalar memory: the parts, which are what one block of queries and one piece have in
    common; where the parts of each step of the grid begin; the pieces; and the block table.

    Args:
        blocks: the cut.
        pieces: of the batch.
        wanted: bool [pieces], those that are computed.
        window: of the layer.
        page_size: tokens per page.
        page_block: pages of a block of keys.
    """
    order = jnp.argsort(jnp.logical_not(wanted), stable=True).astype(jnp.int32)
    present = jnp.arange(len(order)) < wanted.sum()
    nowhere = blocks.tokens + blocks.padding
    starts = jnp.where(present, pieces.starts[:-1][order], nowhere)
    ends = jnp.where(present, pieces.starts[1:][order], nowhere)
    lengths = jnp.where(present, pieces.lengths[order], 0)
    ahead = lengths - ends  # a token's number in the batch → its position
    step = jnp.arange(blocks.cores * blocks.turns, dtype=jnp.int32)
    begins = blocks.number(step // blocks.turns, step % blocks.turns) * blocks.size
    first_piece = (ends[None] <= begins[:, None]).sum(1, dtype=jnp.int32)
    after = (starts[None] < begins[:, None] + blocks.size).sum(1, dtype=jnp.int32)
    total = jnp.cumsum(jnp.maximum(after - first_piece, 0), dtype=jnp.int32)
    spans = jnp.concatenate([jnp.zeros(1, jnp.int32), total])
    part = jnp.arange(len(step) + len(order), dtype=jnp.int32)
    owner = jnp.minimum((total[None] <= part[:, None]).sum(1, dtype=jnp.int32), len(step) - 1)
    piece = jnp.clip(first_piece[owner] + part - spans[owner], 0, len(order) - 1)
    end = jnp.minimum(ends[piece], begins[owner] + blocks.size) + ahead[piece]
    first = jnp.zeros_like(piece)
    if window is not None:
        oldest = jnp.maximum(starts[piece], begins[owner]) + ahead[piece] - (window - 1)
        first = jnp.maximum(oldest, 0) // (page_size * page_block)
    parts = jnp.stack([piece, first, -(-end // page_size)])
    return spans, parts, jnp.stack([starts, ends, ahead, lengths]), pieces.table[order]


class KeyBlock(NamedTuple):
    """A block of keys of one piece. Rows are the tokens of the block of queries for a query head of a KV head, then
    those for the next one.

    Args:
        slot: the buffer that holds its pages.
        pages: how many of them to read: all, or half where no more are there. Static.
        left: its tokens that are there.
        visible: bool [group * size, keys], which keys each row sees.
        mine: bool [group * size, 1], whether a row is of this piece.
    """

    slot: Any
    pages: int
    left: Any
    visible: jax.Array
    mine: jax.Array


def walk(
    blocks: QueryBlocks,
    scalars: tuple[Any, ...],
    copies: PageCopies,
    slots: Any,
    window: int | None,
    page_size: int,
    group: int,
    attend: Callable[[KeyBlock], None],
) -> None:
    """Call `attend` for each block of keys that the queries of this step of the grid see.

    Args:
        blocks: the cut.
        scalars: references of what `scalars_of` gave.
        copies: of the table among them.
        slots: int32 [1] in scalar memory, which buffer is next.
        window: of the layer.
        page_size: tokens per page.
        group: query heads of a KV head.
        attend: computes one.
    """
    spans, parts, pieces, _ = scalars
    page_block = copies.targets[0].shape[1]
    keys = page_block * page_size
    core, turn = pl.program_id(0), pl.program_id(1)
    step = core * blocks.turns + turn
    begin = blocks.number(core, turn) * blocks.size
    end_of_core = spans[(core + 1) * blocks.turns]
    token = begin + jax.lax.broadcasted_iota(jnp.int32, (group * blocks.size, 1), 0) % blocks.size

    def start(part: Any, block: Any, slot: Any) -> None:
        copies.start(parts[_PIECE, part], block, parts[_USED, part], slot)

    @pl.when((turn == 0) & (spans[step] < end_of_core))
    def copy_first() -> None:
        slots[0] = 0
        start(spans[step], parts[_FIRST, spans[step]], 0)

    def attend_part(index: Any, _: None) -> None:
        piece, used = parts[_PIECE, index], parts[_USED, index]
        ahead, last = pieces[_AHEAD, piece], pl.cdiv(used, page_block)
        there = jnp.minimum(used * page_size, pieces[_LENGTH, piece])
        mine = (token >= pieces[_START, piece]) & (token < pieces[_END, piece])
        position = jnp.where(mine, token + ahead, -1)

        def attend_block(number: Any, _: None) -> None:
            slot, later = slots[0], number + 1 < last
            then = jnp.where(later, index, index + 1)

            @pl.when(then < end_of_core)
            def copy_next() -> None:
                start(then, jnp.where(later, number + 1, parts[_FIRST, then]), 1 - slot)

            copies.wait(number, used, slot)
            slots[0] = 1 - slot
            left = there - number * keys

            def read(pages: int) -> None:
                key = number * keys + jax.lax.broadcasted_iota(jnp.int32, (1, pages * page_size), 1)
                visible = key <= position
                if window is not None:
                    visible = visible & (key > position - window)
                attend(KeyBlock(slot, pages, left, visible, mine))

            half = -(-page_block // 2)
            jax.lax.cond(left <= half * page_size, partial(read, half), partial(read, page_block))

        jax.lax.fori_loop(parts[_FIRST, index], last, attend_block, None)

    jax.lax.fori_loop(spans[step], spans[step + 1], attend_part, None)
