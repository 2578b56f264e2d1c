"""Writes a step's keys and values into split pages of float8 on one TPU, in place, as a Pallas kernel. A tile of such
pages holds 32 tokens, four in each row of a register, and memory is copied by tiles: tiles that a step writes in part
are read before. Padding tokens are not written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.layout import TILE_TOKENS, in_float8

BLOCK_BYTES = 2**22
"""About the most of VMEM that the tiles of one step of the grid take, with the tokens beside them."""
ROWS, PACKED = 8, 4
"""Rows of a register, and tokens in each of them."""
ALIGNED = 16
"""Copies of new tokens begin at a multiple of 16, the tokens of a tile of bfloat16."""
NEARBY = TILE_TOKENS + ALIGNED
"""Tokens that are copied for a tile: its own, and those before the first of them in its tile of bfloat16."""


def write_tiles(
    pages: jax.Array,
    *new: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    single: bool,
    interpret: Any = False,
) -> jax.Array:
    """The pages with each real token's keys and values in its slot.

    Args:
        pages: [pages, planes, kv_heads, page_size, width] in float8_e4m3fn, donated; page_size is a multiple of 32.
        new: for each plane [kv_heads, tokens, width] in bfloat16 or float32.
        slots: int32 [tokens], page * page_size + offset.
        starts: int32 [sequences + 1], the first token of each sequence; the last entry is the number of real tokens.
        single: each sequence has one token.
        interpret: run the kernel in an interpreter, see `pl.pallas_call`.
    """
    number, planes, heads, page_size, width = pages.shape
    first, counts, present = _tiles(slots, starts, single)
    item, tokens = new[0].dtype.itemsize, len(slots)
    beside = item * 2 + 4 if single else item * NEARBY  # bytes of new tokens, for each feature of a tile
    block = min(len(first), max(1, BLOCK_BYTES // (planes * heads * width * (TILE_TOKENS + beside))))
    if single:
        block = block if block == tokens else max(block // ALIGNED * ALIGNED, ALIGNED)
        of_new = pl.BlockSpec((heads, block, width), lambda step, *_: (0, step, 0))
        scratch = pltpu.VMEM((planes * heads, block, width), jnp.int32)
    else:
        missing = max(NEARBY, -(-tokens // ALIGNED) * ALIGNED) - tokens
        new = tuple(jnp.pad(one, ((0, 0), (0, missing), (0, 0))) for one in new)
        of_new = pl.BlockSpec(memory_space=pltpu.HBM)
        scratch = pltpu.VMEM((block, planes * heads, NEARBY, width), new[0].dtype)
    written: jax.Array = pl.pallas_call(
        partial(_write_single if single else _write, heads=heads),
        out_shape=pltpu.HBM((number, planes * heads, page_size, width), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(len(first), block),),
            in_specs=[*[of_new] * planes, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((block, planes * heads, TILE_TOKENS, width), pages.dtype),
                pltpu.SemaphoreType.DMA,
                scratch,
            ],
        ),
        input_output_aliases={4 + planes: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=len(first) * planes * heads * width * (2 * TILE_TOKENS + item * (1 if single else NEARBY)),
            transcendentals=0,
        ),
        interpret=interpret,
        name="page_write_tiles",
    )(first, counts, present, slots, *new, pages.reshape(number, planes * heads, page_size, width))
    return written.reshape(pages.shape)


def _tiles(slots: jax.Array, starts: jax.Array, single: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first token of each tile that real tokens lie in, how many lie there, and the number [1] of such tiles."""
    tokens, sequences = len(slots), len(starts) - 1
    if single:
        token = jnp.arange(tokens, dtype=jnp.int32)
        return token, jnp.ones_like(token), starts[-1:]
    before = slots[jnp.minimum(starts[:-1], tokens - 1)] % TILE_TOKENS  # places in a sequence's first tile
    counts = jnp.diff(starts)
    each = jnp.where(counts > 0, -(-(before + counts) // TILE_TOKENS), 0)
    total = jnp.cumsum(each, dtype=jnp.int32)
    tile = jnp.arange(min(tokens, tokens // TILE_TOKENS + 2 * sequences), dtype=jnp.int32)
    owner = jnp.minimum((total[None] <= tile[:, None]).sum(1), sequences - 1)
    place = (tile - (total - each)[owner]) * TILE_TOKENS - before[owner]  # of the tile's first token in the step's
    first = jnp.maximum(place, 0)
    end = jnp.minimum(place + TILE_TOKENS, counts[owner])
    return starts[owner] + first, end - first, total[-1:]


class _Tiles:
    """The tiles of one step of the grid: `first`, `counts` and `slots` as `_tiles` gives them, the pages in HBM, and
    `held` [block, arrays, 32, width] in VMEM, where an array is a head's keys or values."""

    def __init__(self, first: Any, counts: Any, present: Any, slots: Any, pages: Any, held: Any, ready: Any) -> None:
        self.first, self.counts, self.slots = first, counts, slots
        self.pages, self.held, self.ready = pages, held, ready
        self.begin = pl.program_id(0) * held.shape[0]
        self.end = jnp.minimum(self.begin + held.shape[0], present[0])

    def for_each(self, visit: Callable[[Any], None]) -> None:
        """visit(number of the tile) for each tile."""
        jax.lax.fori_loop(self.begin, self.end, lambda index, _: visit(index), None)

    def start_read(self, index: Any) -> None:
        """Begin to copy what a tile holds, of which some stays."""
        pl.when(self.counts[index] < TILE_TOKENS)(
            pltpu.make_async_copy(self._there(index), self._here(index), self.ready).start
        )

    def wait_read(self, index: Any) -> None:
        """Wait for one such copy. Copies end in any order, and the semaphore counts bytes: only after all of these
        waits is any tile known to be there."""
        pl.when(self.counts[index] < TILE_TOKENS)(
            pltpu.make_async_copy(self._there(index), self._here(index), self.ready).wait
        )

    def start_write(self, index: Any, words: Sequence[jax.Array]) -> None:
        """Put new tokens into a tile, and begin to copy it back.

        Args:
            index: of the tile.
            words: for each array uint32 [8, width], in which the new tokens have their places; what lies in others
                is not written.
        """
        entry = jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) * PACKED - self.slots[self.first[index]] % TILE_TOKENS
        mine = jnp.zeros((ROWS, 1), jnp.uint32)
        for byte in range(PACKED):
            new = (entry + byte >= 0) & (entry + byte < self.counts[index])
            mine = mine | jnp.where(new, jnp.uint32(255 << (8 * byte)), jnp.uint32(0))
        place = index - self.begin
        for number, one in enumerate(words):
            before = pltpu.bitcast(self.held[place, number], jnp.uint32)
            self.held[place, number] = pltpu.bitcast((before & ~mine) | (one & mine), self.held.dtype)
        pltpu.make_async_copy(self._here(index), self._there(index), self.ready).start()

    def wait_written(self, index: Any) -> None:
        """Wait until a tile is copied back."""
        pltpu.make_async_copy(self._here(index), self._there(index), self.ready).wait()

    def _here(self, index: Any) -> Any:
        return self.held.at[index - self.begin]

    def _there(self, index: Any) -> Any:
        slot, page_size = self.slots[self.first[index]], self.pages.shape[2]
        offset = pl.multiple_of(slot % page_size // TILE_TOKENS * TILE_TOKENS, TILE_TOKENS)
        return self.pages.at[slot // page_size, :, pl.ds(offset, TILE_TOKENS)]


def _bits(x: jax.Array) -> jax.Array:
    """The 8 bits of each number of x [tokens, width] in float8, int32 0 to 255: also of NaN."""
    return pltpu.bitcast(in_float8(x.astype(jnp.float32)), jnp.uint8).astype(jnp.int32)


def _write_single(first: Any, counts: Any, present: Any, slots: Any, *others: Any, heads: int) -> None:
    """A block of tokens, each in a tile of its own. others: for each plane new tokens [kv_heads, block, width]; the
    pages as input and, the same memory, as output; the tiles; the semaphore; and `bits` int32 [arrays, block, width].
    """
    *new, _pages, pages, held, ready, bits = others
    tiles = _Tiles(first, counts, present, slots, pages, held, ready)
    tiles.for_each(tiles.start_read)
    for number in range(len(bits)):
        bits[number] = _bits(new[number // heads][number % heads])
    tiles.for_each(tiles.wait_read)

    def change(index: Any) -> None:
        # The same token in all places of the tile, of which `start_write` writes one.
        rows = [bits[number, pl.ds(index - tiles.begin, 1)] * 0x01010101 for number in range(len(bits))]
        words = [pltpu.bitcast(jnp.broadcast_to(row, (ROWS, row.shape[1])), jnp.uint32) for row in rows]
        tiles.start_write(index, words)

    tiles.for_each(change)
    tiles.for_each(tiles.wait_written)


def _write(first: Any, counts: Any, present: Any, slots: Any, *others: Any, heads: int) -> None:
    """A block of tiles. others: for each plane new tokens [kv_heads, tokens, width] in HBM; the pages as input and, the
    same memory, as output; the tiles; the semaphore; and `nearby` [block, arrays, 48, width], the new tokens of each
    tile and what lies beside them."""
    *new, _pages, pages, held, ready, nearby = others
    tiles = _Tiles(first, counts, present, slots, pages, held, ready)

    def first_copied(index: Any) -> Any:
        """The first of the tokens that are copied for a tile."""
        return pl.multiple_of(jnp.minimum(first[index] // ALIGNED * ALIGNED, new[0].shape[1] - NEARBY), ALIGNED)

    def copies(index: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(
                one.at[:, pl.ds(first_copied(index), NEARBY)],
                nearby.at[index - tiles.begin, pl.ds(number * heads, heads)],
                ready,
            )
            for number, one in enumerate(new)
        ]

    def start(index: Any) -> None:
        tiles.start_read(index)
        for copy in copies(index):
            copy.start()

    def wait(index: Any) -> None:
        tiles.wait_read(index)
        for copy in copies(index):
            copy.wait()

    def change(index: Any) -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, (TILE_TOKENS, NEARBY), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (TILE_TOKENS, NEARBY), 1)
        ahead = first[index] - first_copied(index) - slots[first[index]] % TILE_TOKENS  # of a row's token among those
        chosen = (column == row + ahead).astype(jnp.float32).astype(jnp.bfloat16)
        words = []
        for number in range(nearby.shape[1]):
            bits = _bits(nearby[index - tiles.begin, number]).astype(jnp.float32).astype(jnp.bfloat16)
            turned = jnp.dot(chosen, bits, preferred_element_type=jnp.float32)  # one number and zeros: exact
            words.append(pltpu.bitcast(turned.astype(jnp.int32).astype(jnp.uint8), jnp.uint32))
        tiles.start_write(index, words)

    for visit in (start, wait, change, tiles.wait_written):
        tiles.for_each(visit)
