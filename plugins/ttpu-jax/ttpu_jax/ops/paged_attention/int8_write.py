"""Quantizes a step's keys and values and writes them into paired int8 pages on one TPU, in place, as one Pallas kernel.
XLA takes a dozen small programs, a gather and two scatters for the same (`write`).

The tokens of a sequence that lie in one page are a run. A token's keys and values are whole tiles of a page, and are
copied there as they are. Its scales are a few columns of a row, so the scales of each run's page are read, changed and
written back. Padding tokens are not written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.int8_blocks import LANES, PAIR, QUERY_TILE
from ttpu_jax.ops.paged_attention.layout import scales_of, widened
from ttpu_jax.ops.paged_attention.runs import Runs, when

TOKENS_OF_ROW = LANES // PAIR  # whose scales one row holds
MOST_TOKENS = 256  # of one step of the grid
VMEM_BYTES = 6 << 20  # limit of what `_tokens_of_step` counts


def write(kv: PagedKV, key: jax.Array, value: jax.Array, batch: RaggedBatch, *, interpret: bool = False) -> PagedKV:
    """The pages with each real token's key and value in its slot.

    Args:
        kv: one device's paired pages.
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim].
        batch: the flat batch.
        interpret: run the kernel in the interpreter.
    """
    assert kv.scales is not None
    page_size, rows = kv.pages.shape[1:3]
    page_rows = page_size // TOKENS_OF_ROW
    pairs = kv.scales.shape[1] // page_rows
    width = rows // PAIR // pairs * LANES
    keys, values = (widened(x, width).swapaxes(0, 1) for x in (key, value))
    heads, tokens, _ = keys.shape
    single = batch.max_queries == 1
    sequences = len(batch.kv_lens)
    block, runs = _tokens_of_step(kv, keys, single=single, sequences=sequences)
    per_head = pl.BlockSpec((heads, block, width), lambda i, *_: (0, i, 0))
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    moved = 2 * keys.nbytes + tokens * rows * LANES
    pages_written = min(tokens, tokens // page_size + 2 * sequences)
    call = pl.pallas_call(
        partial(_write, single=single),
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in (kv.pages, kv.scales)],  # as in `page_write`
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(tokens, block),),
            in_specs=[per_head, per_head, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                pltpu.VMEM((block, rows, LANES), jnp.int8),
                pltpu.VMEM((block * rows // PAIR, LANES), jnp.int32),
                pltpu.VMEM((pairs, block, LANES), jnp.float32),
                pltpu.VMEM((runs, *kv.scales.shape[1:]), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={5: 0, 6: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * 2 * keys.size,  # of each number its magnitude, a comparison, a product and rounding
            bytes_accessed=moved + 2 * pages_written * kv.scales.nbytes // len(kv.scales),
            transcendentals=0,
        ),
        interpret=interpret,
        name="int8_page_write",
    )
    pages, scales = call(batch.slots[kv.group], batch.rows, batch.query_starts, keys, values, kv.pages, kv.scales)
    return replace(kv, pages=pages, scales=scales)


def _tokens_of_step(kv: PagedKV, keys: jax.Array, *, single: bool, sequences: int) -> tuple[int, int]:
    """Tokens of a step of the grid, and the most runs that they make. `single`: each sequence has one token."""
    assert kv.scales is not None
    heads, tokens, width = keys.shape
    page_size, rows = kv.pages.shape[1:3]
    block = min(tokens, MOST_TOKENS)
    while True:
        runs = block if single else min(block, block // page_size + 2 * sequences)
        each = 4 * heads * width * keys.dtype.itemsize + rows * LANES + 4 * rows * LANES
        if block <= QUERY_TILE or block * each + runs * kv.scales.nbytes // len(kv.scales) <= VMEM_BYTES:
            return block, runs
        block = max(QUERY_TILE, block // 2 // QUERY_TILE * QUERY_TILE)


def _write(
    slots: Any,
    rows: Any,
    starts: Any,
    key: Any,
    value: Any,
    _pages: Any,
    _scales: Any,
    pages: Any,
    scales: Any,
    staged: Any,
    words: Any,
    entries: Any,
    held: Any,
    finished: Any,
    *,
    single: bool,
) -> None:
    """A block of tokens. key and value [kv_heads, tokens, width]; `pages` and `scales` are `_pages` and `_scales`."""
    block, page_size = key.shape[1], pages.shape[1]
    begin = pl.program_id(0) * block
    end = jnp.minimum(begin + block, starts[starts.shape[0] - 1])  # real tokens come first

    runs = Runs(slots, rows, starts, begin, end, block, page_size, single)

    def reading(slot: Any, run: Any) -> Any:
        """The copy of the scales of a run's page into VMEM."""
        return pltpu.make_async_copy(scales.at[jax.lax.div(slot, page_size)], held.at[run], finished.at[0])

    def writing(slot: Any, run: Any) -> Any:
        """The copy of the scales of a run's page from VMEM."""
        return pltpu.make_async_copy(held.at[run], scales.at[jax.lax.div(slot, page_size)], finished.at[1])

    def copies(token: Any, slot: Any, count: Any) -> list[tuple[Any, Any]]:
        return runs.copies(token, slot, count, staged, pages, finished.at[1])

    def write_rows(token: Any, slot: Any, count: Any, run: Any) -> None:
        for there, copy in copies(token, slot, count):
            when(there, copy.start)

    def write_scales(token: Any, slot: Any, count: Any, run: Any) -> None:
        _merge(entries, held, run, token - begin, jax.lax.rem(slot, page_size), count, single=single)
        writing(slot, run).start()

    def wait_for_run(token: Any, slot: Any, count: Any, run: Any) -> None:
        for there, copy in copies(token, slot, count):
            when(there, copy.wait)
        writing(slot, run).wait()

    runs.for_each(lambda token, slot, count, run: reading(slot, run).start())
    _quantize(key, value, staged, words, entries)
    runs.for_each(write_rows)
    runs.for_each(lambda token, slot, count, run: reading(slot, run).wait())
    runs.for_each(write_scales)
    runs.for_each(wait_for_run)


def _quantize(key: Any, value: Any, staged: Any, words: Any, entries: Any) -> None:
    """Fills `staged` [tokens, rows, 128] with int8, by way of `words` of four of them, and `entries` [pairs, tokens,
    128] with each token's four scales, repeated along its columns."""
    _, tokens, width = key.shape
    pairs, halves = entries.shape[0], width // LANES
    entry = jax.lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1) & (PAIR - 1)
    for pair in range(pairs):
        packed, columns = jnp.zeros((tokens, width), jnp.int32), jnp.zeros((tokens, LANES), jnp.float32)
        for number in range(PAIR):
            x = (key, value)[number % 2][2 * pair + number // 2].astype(jnp.float32)
            scale = scales_of(jnp.abs(x).max(1, keepdims=True))
            whole = jnp.round(x / scale).astype(jnp.int32)
            packed |= (whole & 255) << (8 * number)
            columns = jnp.where(entry == number, scale, columns)
        entries[pair] = columns
        for half in range(halves):
            word, part = half * pairs + pair, packed[:, half * LANES : (half + 1) * LANES]
            if pairs * halves == 1:
                words[...] = part
            else:
                words[pl.ds(word, tokens, stride=pairs * halves), :] = part
    staged[...] = pltpu.bitcast(words[...], jnp.int8).reshape(staged.shape)


def _merge(entries: Any, held: Any, run: Any, token: Any, offset: Any, count: Any, *, single: bool) -> None:
    """Puts the scales of `count` tokens from `token` on into the page `held[run]`, from `offset` in the page on."""
    pairs, page_rows = entries.shape[0], held.shape[1] // entries.shape[0]
    owner = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // PAIR

    def merge_row(row: Any, _: None) -> None:
        places = [pl.ds(pair * page_rows + row, 1) for pair in range(pairs)]

        def one(at: Any, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            new = [entries[pair, pl.ds(token + at - offset, 1), :] for pair in range(pairs)]
            mine = owner == at - row * TOKENS_OF_ROW
            return tuple(jnp.where(mine, more, before) for more, before in zip(new, found, strict=True))

        before = tuple(held[run, place, :] for place in places)
        first, last = row * TOKENS_OF_ROW, (row + 1) * TOKENS_OF_ROW
        if single:
            after = one(offset, before)
        else:
            after = jax.lax.fori_loop(jnp.maximum(offset, first), jnp.minimum(offset + count, last), one, before)
        for place, found in zip(places, after, strict=True):
            held[run, place, :] = found

    first = jax.lax.div(offset, TOKENS_OF_ROW)
    if single:
        merge_row(first, None)
    else:
        jax.lax.fori_loop(first, jax.lax.div(offset + count - 1, TOKENS_OF_ROW) + 1, merge_row, None)
