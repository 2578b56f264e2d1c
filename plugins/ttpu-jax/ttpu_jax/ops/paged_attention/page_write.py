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
    tokens = len(rows)
    block = max(1, min(tokens, BLOCK_BYTES * tokens // rows.nbytes))
    written: jax.Array = pl.pallas_call(
        partial(_write, single=single),
        out_shape=pltpu.HBM(pages.shape, pages.dtype),  # else XLA may keep small pools in VMEM, and copy them
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(tokens, block),),
            in_specs=[
                pl.BlockSpec((block, *rows.shape[1:]), lambda step, *_: (step, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * rows.nbytes, transcendentals=0),
        interpret=interpret,
        name="page_write",
    )(slots, owners, starts, rows, pages)
    return written


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
