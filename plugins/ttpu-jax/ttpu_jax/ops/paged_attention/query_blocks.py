"""Blocks of queries inside a kernel: which pieces a block has queries of, which blocks of keys these see, and a walk
through them that copies the pages of the next ones while one is computed. A step of the grid computes one block of
queries. Where a device has two cores, these take turns, since later queries see more keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.pieces import Pieces

TWO_CORES = ("TPU v4", "TPU v5")
"""Kinds of devices whose two cores share the steps of a grid."""
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
    turn = jnp.arange(blocks.cores * blocks.turns, dtype=jnp.int32)
    begins = blocks.number(turn // blocks.turns, turn % blocks.turns) * blocks.size
    first_piece = (ends[None] <= begins[:, None]).sum(1, dtype=jnp.int32)
    after = (starts[None] < begins[:, None] + blocks.size).sum(1, dtype=jnp.int32)
    total = jnp.cumsum(jnp.maximum(after - first_piece, 0), dtype=jnp.int32)
    spans = jnp.concatenate([jnp.zeros(1, jnp.int32), total])
    part = jnp.arange(len(turn) + len(order), dtype=jnp.int32)
    owner = jnp.minimum((total[None] <= part[:, None]).sum(1, dtype=jnp.int32), len(turn) - 1)
    piece = jnp.clip(first_piece[owner] + part - spans[owner], 0, len(order) - 1)
    end = jnp.minimum(ends[piece], begins[owner] + blocks.size) + ahead[piece]
    first = jnp.zeros_like(piece)
    if window is not None:
        oldest = jnp.maximum(starts[piece], begins[owner]) + ahead[piece] - (window - 1)
        first = jnp.maximum(oldest, 0) // (page_size * page_block)
    parts = jnp.stack([piece, first, -(-end // page_size)])
    return spans, parts, jnp.stack([starts, ends, ahead, lengths]), pieces.table[order]


def walk(
    blocks: QueryBlocks,
    scalars: tuple[Any, ...],
    copies: PageCopies,
    slots: Any,
    window: int | None,
    page_size: int,
    group: int,
    attend: Callable[[Any, Any, jax.Array], None],
) -> None:
    """Call `attend` for each block of keys that the queries of this step of the grid see: with the buffer that holds
    its pages, the number of its tokens that are there, and bool [group * size, keys], which keys each row sees. Rows
    are the tokens of the block for a query head of a KV head, then those for the next one.

    Args:
        blocks: the cut.
        scalars: references of what `scalars_of` gave.
        copies: of the table among them.
        slots: int32 [1] in scalar memory, which buffer is next.
        window: of the layer.
        page_size: tokens per page.
        group: query heads of a KV head.
        attend: computes a block of keys.
    """
    spans, parts, pieces, _ = scalars
    page_block = copies.targets[0].shape[1]
    keys = page_block * page_size
    core, turn = pl.program_id(0), pl.program_id(1)
    step = core * blocks.turns + turn
    begin = blocks.number(core, turn) * blocks.size
    end_of_core = spans[(core + 1) * blocks.turns]
    token = begin + jax.lax.broadcasted_iota(jnp.int32, (group * blocks.size, 1), 0) % blocks.size
    place = jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)

    def start(part: Any, block: Any, slot: Any) -> None:
        copies.start(parts[_PIECE, part], block, parts[_USED, part], slot)

    @pl.when((turn == 0) & (spans[step] < end_of_core))
    def copy_first() -> None:
        slots[0] = 0
        start(spans[step], parts[_FIRST, spans[step]], 0)

    def part(index: Any, _: None) -> None:
        piece, used = parts[_PIECE, index], parts[_USED, index]
        ahead, last = pieces[_AHEAD, piece], pl.cdiv(used, page_block)
        there = jnp.minimum(used * page_size, pieces[_LENGTH, piece])
        mine = (token >= pieces[_START, piece]) & (token < pieces[_END, piece])
        position = jnp.where(mine, token + ahead, -1)

        def block(number: Any, _: None) -> None:
            slot, later = slots[0], number + 1 < last
            then = jnp.where(later, index, index + 1)

            @pl.when(then < end_of_core)
            def copy_next() -> None:
                start(then, jnp.where(later, number + 1, parts[_FIRST, then]), 1 - slot)

            copies.wait(number, used, slot)
            slots[0] = 1 - slot
            key = number * keys + place
            visible = key <= position
            if window is not None:
                visible = visible & (key > position - window)
            attend(slot, there - number * keys, visible)

        jax.lax.fori_loop(parts[_FIRST, index], last, block, None)

    jax.lax.fori_loop(spans[step], spans[step + 1], part, None)
