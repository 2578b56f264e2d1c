"""Writes a step's keys and values into split pages of float8 or int8 on one TPU, in place, as a Pallas kernel. A tile
of such pages holds 32 tokens, four in each row of a register, and memory is copied by tiles: tiles that a step writes
in part are read before. So are the scales of a tile, which int8 pages have. Padding tokens are not written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.batch import PagedKV
from ttpu_jax.ops.paged_attention.layout import INT8_LIMIT, LANES, SMALLEST, TILE_TOKENS, in_float8

BLOCK_BYTES = 2**22
"""About the most of VMEM that the tiles of one step of the grid take, with the tokens beside them."""
ROWS, PACKED = 8, 4
"""Rows of a register, and tokens in each of them."""
ALIGNED = 16
"""Copies of new tokens begin at a multiple of 16, the tokens of a tile of bfloat16."""
NEARBY = TILE_TOKENS + ALIGNED
"""Tokens that are copied for a tile: its own, and those before the first of them in its tile of bfloat16."""


def write_tiles(
    kv: PagedKV,
    *new: jax.Array,
    slots: jax.Array,
    starts: jax.Array,
    single: bool,
    interpret: Any = False,
) -> PagedKV:
    """The pages with each real token's keys and values in its slot.

    Args:
        kv: one device's split pages in float8_e4m3fn or int8, donated; their size is a multiple of 32.
        new: for each plane [kv_heads, tokens, width] in bfloat16 or float32.
        slots: int32 [tokens], page * page_size + offset.
        starts: int32 [sequences + 1], the first token of each sequence; the last entry is the number of real tokens.
        single: each sequence has one token.
        interpret: run the kernel in an interpreter, see `pl.pallas_call`.
    """
    number, planes, heads, page_size, width = kv.pages.shape
    first, counts, present = _tiles(slots, starts, single)
    item, tokens = new[0].dtype.itemsize, len(slots)
    beside = item * 2 + 4 if single else item * NEARBY  # bytes of new tokens, for each feature of a tile
    tile_bytes = planes * heads * width * (TILE_TOKENS + beside)
    pools = [kv.pages.reshape(number, planes * heads, page_size, width)]
    held: list[tuple[int, ...]] = [(planes * heads, TILE_TOKENS, width)]
    if kv.scales is not None:
        pools, held = [*pools, kv.scales], [*held, (1, kv.scales.shape[3])]
        tile_bytes += (kv.scales.shape[3] + (planes * heads * LANES if single else 0)) * 4
    block = min(len(first), max(1, BLOCK_BYTES // tile_bytes))
    if single:
        block = block if block == tokens else max(block // ALIGNED * ALIGNED, ALIGNED)
        of_new = pl.BlockSpec((heads, block, width), lambda step, *_: (0, step, 0))
        scratch = [pltpu.VMEM((planes * heads, block, width), jnp.int32)]
        if kv.scales is not None:
            scratch.append(pltpu.VMEM((planes * heads, block, LANES), jnp.float32))
    else:
        missing = max(NEARBY, -(-tokens // ALIGNED) * ALIGNED) - tokens
        new = tuple(jnp.pad(one, ((0, 0), (0, missing), (0, 0))) for one in new)
        of_new = pl.BlockSpec(memory_space=pltpu.HBM)
        scratch = [pltpu.VMEM((block, planes * heads, NEARBY, width), new[0].dtype)]
    written = pl.pallas_call(
        partial(_write_single if single else _write, planes=planes, heads=heads),
        out_shape=[pltpu.HBM(pool.shape, pool.dtype) for pool in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(len(first), block),),
            in_specs=[*[of_new] * planes, *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools)],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools),
            scratch_shapes=[
                *[pltpu.VMEM((block, *shape), pool.dtype) for pool, shape in zip(pools, held, strict=True)],
                pltpu.SemaphoreType.DMA,
                *scratch,
            ],
        ),
        input_output_aliases={4 + planes + pool: pool for pool in range(len(pools))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=len(first) * planes * heads * width * (2 * TILE_TOKENS + item * (1 if single else NEARBY))
            + (0 if kv.scales is None else len(first) * kv.scales.shape[3] * 2 * 4),
            transcendentals=0,
        ),
        interpret=interpret,
        name="page_write_tiles",
    )(first, counts, present, slots, *new, *pools)
    scales = None if kv.scales is None else written[1]
    return replace(kv, pages=written[0].reshape(kv.pages.shape), scales=scales)


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
    """The tiles of one step of the grid: `first`, `counts` and `slots` as `_tiles` gives them; the `pools` in HBM,
    which are pages [pages, arrays, page_size, width] and perhaps their scales; and what is `held` of them in VMEM:
    tiles [block, arrays, 32, width], where an array is a head's keys or values, and scales [block, 1, columns]."""

    def __init__(
        self, first: Any, counts: Any, present: Any, slots: Any, pools: Sequence[Any], held: Sequence[Any], ready: Any
    ) -> None:
        self.first, self.counts, self.slots = first, counts, slots
        self.pools, self.held, self.ready = pools, held, ready
        self.begin = pl.program_id(0) * held[0].shape[0]
        self.end = jnp.minimum(self.begin + held[0].shape[0], present[0])

    def for_each(self, visit: Callable[[Any], None]) -> None:
        """visit(number of the tile) for each tile."""
        jax.lax.fori_loop(self.begin, self.end, lambda index, _: visit(index), None)

    def start_read(self, index: Any) -> None:
        """Begin to copy what a tile holds, of which some stays."""
        for there, here in zip(self._there(index), self._here(index), strict=True):
            pl.when(self.counts[index] < TILE_TOKENS)(pltpu.make_async_copy(there, here, self.ready).start)

    def wait_read(self, index: Any) -> None:
        """Wait for one such copy. Copies end in any order, and the semaphore counts bytes: only after all of these
        waits is any tile known to be there."""
        for there, here in zip(self._there(index), self._here(index), strict=True):
            pl.when(self.counts[index] < TILE_TOKENS)(pltpu.make_async_copy(there, here, self.ready).wait)

    def start_write(self, index: Any, words: Sequence[jax.Array], scales: Sequence[jax.Array] = ()) -> None:
        """Put new tokens into a tile, and begin to copy it back.

        Args:
            index: of the tile.
            words: for each array uint32 [8, width], in which the new tokens have their places; what lies in others
                is not written.
            scales: for each row of scales float32 [1, 128]. The same holds for these.
        """
        before, place = self.slots[self.first[index]] % TILE_TOKENS, index - self.begin  # tokens before in the tile

        def is_new(token: jax.Array) -> jax.Array:
            return (token >= before) & (token < before + self.counts[index])

        token = jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) * PACKED
        mine = jnp.zeros((ROWS, 1), jnp.uint32)
        for byte in range(PACKED):
            mine = mine | jnp.where(is_new(token + byte), jnp.uint32(255 << (8 * byte)), jnp.uint32(0))
        for number, one in enumerate(words):
            kept = pltpu.bitcast(self.held[0][place, number], jnp.uint32)
            self.held[0][place, number] = pltpu.bitcast((kept & ~mine) | (one & mine), self.held[0].dtype)
        for number, row in enumerate(scales):
            own = place, slice(None), slice(number * LANES, (number + 1) * LANES)
            self.held[1][own] = jnp.where(is_new(_lane() % TILE_TOKENS), row, self.held[1][own])
        for there, here in zip(self._there(index), self._here(index), strict=True):
            pltpu.make_async_copy(here, there, self.ready).start()

    def rows(self, scales: Sequence[jax.Array], planes: int) -> list[jax.Array]:
        """Rows of scales [1, 128] as they are kept, of those of each array [1, 128], in which every 32 columns have the
        scales of the tile's tokens."""
        if not scales:
            return []
        heads, columns = len(scales) // planes, self.held[1].shape[2]
        rows = [scales[0]] * (columns // LANES)
        for head in range(heads):
            for plane in range(planes):
                number, first = divmod(head * columns // heads + plane * TILE_TOKENS, LANES)
                own = _lane() // TILE_TOKENS == first // TILE_TOKENS
                rows[number] = jnp.where(own, scales[plane * heads + head], rows[number])
        return rows

    def wait_written(self, index: Any) -> None:
        """Wait until a tile is copied back."""
        for there, here in zip(self._there(index), self._here(index), strict=True):
            pltpu.make_async_copy(here, there, self.ready).wait()

    def _here(self, index: Any) -> list[Any]:
        return [held.at[index - self.begin] for held in self.held]

    def _there(self, index: Any) -> list[Any]:
        pages, *scales = self.pools
        slot, page_size = self.slots[self.first[index]], pages.shape[2]
        page, tile = slot // page_size, slot % page_size // TILE_TOKENS
        offset = pl.multiple_of(tile * TILE_TOKENS, TILE_TOKENS)
        return [pages.at[page, :, pl.ds(offset, TILE_TOKENS)], *[pool.at[page, tile] for pool in scales]]


def _lane() -> jax.Array:
    """The numbers [1, 128] of lanes."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)


def _quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """The 8 bits of each number of x [tokens, width] as int32, also of NaN; and the scales [tokens, 1] of int8."""
    wide = x.astype(jnp.float32)
    if dtype != jnp.int8:
        return pltpu.bitcast(in_float8(wide), jnp.uint8).astype(jnp.int32), None
    scale = jnp.maximum(jnp.abs(wide).max(1, keepdims=True), SMALLEST) / INT8_LIMIT
    return jnp.round(wide / scale).astype(jnp.int32) & 255, scale


def _write_single(first: Any, counts: Any, present: Any, slots: Any, *others: Any, planes: int, heads: int) -> None:
    """A block of tokens, each in a tile of its own. others: for each plane new tokens [kv_heads, block, width]; the
    pools as input and, the same memory, as output; the tiles; the semaphore; `bits` int32 [arrays, block, width], and
    where there are scales these, float32 [arrays, block, 128], repeated along lanes."""
    new, pools, held, (ready, bits, *spread) = _named(others, planes)
    tiles = _Tiles(first, counts, present, slots, pools, held, ready)
    tiles.for_each(tiles.start_read)
    for number in range(len(bits)):
        bits[number], scale = _quantized(new[number // heads][number % heads], pools[0].dtype)
        if scale is not None:
            spread[0][number] = jnp.broadcast_to(scale, spread[0].shape[1:])
    tiles.for_each(tiles.wait_read)

    def change(index: Any) -> None:
        # The same token in all places of the tile, of which `start_write` writes one.
        place = pl.ds(index - tiles.begin, 1)
        rows = [bits[number, place] * 0x01010101 for number in range(len(bits))]
        words = [pltpu.bitcast(jnp.broadcast_to(row, (ROWS, row.shape[1])), jnp.uint32) for row in rows]
        scales = [one[number, place] for one in spread for number in range(len(bits))]
        tiles.start_write(index, words, tiles.rows(scales, planes))

    tiles.for_each(change)
    tiles.for_each(tiles.wait_written)


def _write(first: Any, counts: Any, present: Any, slots: Any, *others: Any, planes: int, heads: int) -> None:
    """A block of tiles. others: for each plane new tokens [kv_heads, tokens, width] in HBM; the pools as input and, the
    same memory, as output; the tiles; the semaphore; and `nearby` [block, arrays, 48, width], the new tokens of each
    tile and what lies beside them."""
    new, pools, held, (ready, nearby) = _named(others, planes)
    tiles = _Tiles(first, counts, present, slots, pools, held, ready)

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
        token = jax.lax.broadcasted_iota(jnp.int32, (NEARBY, LANES), 0)
        of_lane = token == _lane() % TILE_TOKENS + ahead
        words, rows = [], []
        for number in range(planes * heads):
            bits, scale = _quantized(nearby[index - tiles.begin, number], pools[0].dtype)
            turned = jnp.dot(  # of one number and zeros: exact
                chosen, bits.astype(jnp.float32).astype(jnp.bfloat16), preferred_element_type=jnp.float32
            )
            words.append(pltpu.bitcast(turned.astype(jnp.int32).astype(jnp.uint8), jnp.uint32))
            if scale is not None:
                rows.append(jnp.where(of_lane, scale, 0.0).sum(0, keepdims=True))
        tiles.start_write(index, words, tiles.rows(rows, planes))

    for visit in (start, wait, change, tiles.wait_written):
        tiles.for_each(visit)


def _named(others: Sequence[Any], planes: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
    """New tokens of each plane, pools as output, what is held of them, and the rest of a kernel's arguments."""
    new, others = others[:planes], others[planes:]
    pools = 2 if others[0].dtype == jnp.int8 else 1
    return new, others[pools : 2 * pools], others[2 * pools : 3 * pools], others[3 * pools :]
