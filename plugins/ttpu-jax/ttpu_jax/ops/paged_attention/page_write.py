"""Writes a step's rows of keys and values into pages on one TPU, in place, as a Pallas kernel: the rows of a run of
tokens are copied as they are, and all copies of a block of tokens are under way at once. XLA's scatter reads, changes
and writes back sixteen tokens at a time. Padding tokens are not written."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_jax.ops.paged_attention.runs import Runs, when

BLOCK_BYTES = 2**20
"""The most of the rows of one step of the grid."""
TILE = 16
"""Tokens of a tile of bfloat16."""


def write_rows(
    pages: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    owners: jax.Array,
    starts: jax.Array,
    *,
    single: bool,
    interpret: bool = False,
) -> jax.Array:
    """The pages with each real token's rows in its slot.

    Args:
        pages: [pages, page_size, rows, width], donated.
        rows: [tokens, rows, width] in the pages' dtype.
        slots: int32 [tokens], page * page_size + offset.
        owners: int32 [tokens], the sequence of each token.
        starts: int32 [sequences + 1], the first token of each sequence; the last entry is the number of real tokens.
        single: each sequence has one token.
        interpret: run the kernel in the interpreter.
    """
    block = _block_tokens(pages, len(rows))
    of_rows = pl.BlockSpec((block, *rows.shape[1:]), lambda step, *_: (step, 0, 0))
    scalars = slots, owners, starts
    return _written(pages, (rows,), [of_rows], scalars, block, [], partial(_write, single=single), interpret)


def write_heads(
    pages: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: jax.Array,
    owners: jax.Array,
    starts: jax.Array,
    *,
    single: bool,
    interpret: bool = False,
) -> jax.Array:
    """The same for keys and values that lie head by head, whose rows the kernel puts in order: XLA would copy them for
    that, which takes longer.

    Args:
        pages: [pages, page_size, rows, width] in bfloat16 or float32, donated.
        key: [kv_heads, tokens, parts * width] in the pages' dtype.
        value: [kv_heads, tokens, parts * width], the same.
        slots: int32 [tokens], page * page_size + offset.
        owners: int32 [tokens], the sequence of each token.
        starts: int32 [sequences + 1], the first token of each sequence; the last entry is the number of real tokens.
        single: each sequence has one token.
        interpret: run the kernel in the interpreter.
    """
    heads, tokens, features = key.shape
    block = _block_tokens(pages, tokens)
    block = block if block == tokens else max(block // TILE * TILE, TILE)
    of_heads = pl.BlockSpec((heads, block, features), lambda step, *_: (0, step, 0))
    words = pages.shape[2] * pages.dtype.itemsize // 4  # of 32 bits, in as many rows
    scratch = [pltpu.VMEM((block * words, pages.shape[3]), jnp.uint32)]
    scalars = slots, owners, starts
    body = partial(_write_heads, single=single)
    return _written(pages, (key, value), [of_heads, of_heads], scalars, block, scratch, body, interpret)


def _block_tokens(pages: jax.Array, tokens: int) -> int:
    """Tokens of one step of the grid."""
    return max(1, min(tokens, BLOCK_BYTES // (pages[0, 0].size * pages.dtype.itemsize)))


def _written(
    pages: jax.Array,
    new: tuple[jax.Array, ...],
    blocks: list[Any],
    scalars: tuple[jax.Array, ...],
    block: int,
    scratch: list[Any],
    body: Any,
    interpret: bool,
) -> jax.Array:
    """The pages after a kernel with this body has written `new` arrays, in blocks of so many tokens."""
    written: jax.Array = pl.pallas_call(
        body,
        out_shape=pltpu.HBM(pages.shape, pages.dtype),  # else XLA may keep small pools in VMEM, and copy them
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(len(scalars[0]), block),),
            in_specs=[*blocks, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA, *scratch],
        ),
        input_output_aliases={len(scalars) + len(new): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * sum(array.nbytes for array in new), transcendentals=0
        ),
        interpret=interpret,
        name="page_write",
    )(*scalars, *new, pages)
    return written


def _write_heads(
    slots: Any,
    owners: Any,
    starts: Any,
    keys: Any,
    values: Any,
    _pages: Any,
    pages: Any,
    finished: Any,
    words: Any,
    *,
    single: bool,
) -> None:
    """A block of tokens: keys and values [kv_heads, tokens, features]. Their rows, as `page_rows.separated` reads them,
    are put into `words` [tokens * rows, width] of 32 bits."""
    heads, tokens, features = keys.shape
    width, count = words.shape[1], words.shape[0] // tokens
    parts, halves = features // width, pages.dtype != jnp.float32
    padded = count // parts if halves else count // (2 * parts)
    if heads < padded:
        words[...] = jnp.zeros(words.shape, words.dtype)

    def store(place: int, row: jax.Array) -> None:
        words[place::count, :] = row

    for head in range(heads):
        for part in range(parts):
            lanes, place = slice(part * width, (part + 1) * width), part * padded + head
            key, value = (
                jax.lax.bitcast_convert_type(each[head, :, lanes].astype(jnp.float32), jnp.uint32)
                for each in (keys, values)
            )
            if halves:  # a bfloat16 is the upper half of a float32
                store(place, (key >> 16) | ((value >> 16) << 16))
            else:
                store(2 * place, key)
                store(2 * place + 1, value)
    rows = words.reshape(tokens, count, width).bitcast(pages.dtype)
    _write(slots, owners, starts, rows, _pages, pages, finished, single=single)


def _write(
    slots: Any, owners: Any, starts: Any, rows: Any, _pages: Any, pages: Any, finished: Any, *, single: bool
) -> None:
    """A block of tokens: rows [tokens, rows, width]; `pages` is `_pages`."""
    block = rows.shape[0]
    begin = pl.program_id(0) * block
    end = jnp.minimum(begin + block, starts[starts.shape[0] - 1])  # real tokens come first
    runs = Runs(slots, owners, starts, begin, end, block, pages.shape[1], single)

    def start(token: Any, slot: Any, count: Any, run: Any) -> None:
        for there, copy in runs.copies(token, slot, count, rows, pages, finished):
            when(there, copy.start)

    def wait(token: Any, slot: Any, count: Any, run: Any) -> None:
        for there, copy in runs.copies(token, slot, count, rows, pages, finished):
            when(there, copy.wait)

    runs.for_each(start)
    runs.for_each(wait)
