"""The gradient of the kernels of `ttpu_jax.ops.grouped` as a Pallas kernel for a TPU: the sum of gradient times x over
each group's rows.

A block of a group's gradient stays on the chip while the group's rows are visited. Where a block has other rows too,
these are taken as zero. megablox, whose kernel this was, masks each block of both operands, in float32, and transposes
one of them in float32."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec.arithmetic import product_flops
from ttpu_jax.ops.grouped_tpu import block_of, pad_rows, stored_transposed, visits_of

BLOCK_BYTES = 2048
"""Of a row of a block, of both sides. In bfloat16 a block's float32 sums take 4 MiB of VMEM then, of 16, and each side
is read once for 1,024 features of the other. By the compiler's cycles the sums of 4,096 rows for kernels of 1,536 x
2,048 features take 86,000 on v6e and 117,000 on v5p (least: 49,000 and 98,000); in blocks of 512 features 142,000 and
146,000."""


def kernel_gradient(
    x: jax.Array,
    gradient: jax.Array,
    sizes: jax.Array,
    kernels: jax.Array | jax.ShapeDtypeStruct,
    sums: jax.Array | None = None,
    *,
    finite: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """The sum of gradient times x over each group's rows, zero for a group without rows.

    Args:
        x: [rows, in].
        gradient: [rows, out].
        sizes: [groups], the number of rows of each group. Rows after the last group may be anything.
        kernels: [groups, *out, in], for its shape and dtype.
        sums: [groups, *out, in], to which the gradient is added in float32, in place; None adds it to nothing.
        finite: what is not finite in x counts as the largest finite number: times a zero of the gradient it would be no
            number.
        interpret: run the kernel in the interpreter.

    Returns:
        [groups, out, in] in the dtype of `kernels`, all output dimensions merged.
    """
    swap = stored_transposed(kernels)
    (x, block_rows), (gradient, _) = pad_rows(x, len(sizes)), pad_rows(gradient, len(sizes))
    left, right = (x, gradient) if swap else (gradient, x)
    rows, shape = len(x), (left.shape[1], right.shape[1])
    item = jnp.dtype(kernels.dtype).itemsize
    blocks = tuple(block_of(size, BLOCK_BYTES // max(item, x.dtype.itemsize)) for size in shape)
    across, along = (pl.cdiv(size, block) for size, block in zip(shape, blocks, strict=True))
    group, tile, starts, ends, visits = visits_of(sizes, rows, block_rows, every=True)
    groups = len(sizes)
    read = left.nbytes * along + right.nbytes * across
    of_group = pl.BlockSpec((None, *blocks), lambda m, n, visit, group, *_: (group[visit], m, n))
    if sums is not None:
        sums = sums.reshape(groups, -1, sums.shape[-1])
        sums = sums.swapaxes(1, 2) if swap else sums
        read += sums.nbytes
    total = pl.pallas_call(
        partial(_visit, block_rows=block_rows, clamped=(finite and swap, finite and not swap)),
        out_shape=jax.ShapeDtypeStruct((groups, *shape), kernels.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(across, along, visits),
            in_specs=[
                pl.BlockSpec((block_rows, blocks[0]), lambda m, n, visit, group, tile, *_: (tile[visit], m)),
                pl.BlockSpec((block_rows, blocks[1]), lambda m, n, visit, group, tile, *_: (tile[visit], n)),
                None if sums is None else of_group,
            ],
            out_specs=of_group,
            scratch_shapes=[pltpu.VMEM(blocks, jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=int(product_flops(shape[0] * shape[1], rows)),
            bytes_accessed=read + groups * shape[0] * shape[1] * item,
            transcendentals=0,
        ),
        input_output_aliases={} if sums is None else {6: 0},
        interpret=interpret,
        name="grouped_gradient",
    )(group, tile, starts, ends, left, right, sums)
    return total.swapaxes(1, 2) if swap else total


def _visit(
    group_of: jax.Array,
    tile_of: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    left: jax.Array,
    right: jax.Array,
    sums: jax.Array | None,
    out: jax.Array,
    total: jax.Array,
    *,
    block_rows: int,
    clamped: tuple[bool, bool],
) -> None:
    """Add the rows of one group in one block of rows to a block of the group's gradient. `clamped`: of which operand
    what is not finite is replaced."""
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    group, first_row = group_of[visit], tile_of[visit] * block_rows
    start, end = starts[group] - first_row, ends[group] - first_row

    @pl.when((visit == 0) | (group_of[jnp.maximum(visit - 1, 0)] != group))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def add(*sides: jax.Array) -> None:
        left, right = (_finite(side) if clamp else side for side, clamp in zip(sides, clamped, strict=True))
        total[...] += jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    whole = (start <= 0) & (end >= block_rows)

    @pl.when(whole)
    def _() -> None:
        add(left[...], right[...])

    @pl.when(jnp.logical_not(whole) & (start < end))
    def _() -> None:
        add(_within(left[...], start, end), _within(right[...], start, end))

    @pl.when((visit == last) | (group_of[jnp.minimum(visit + 1, last)] != group))
    def _() -> None:
        found = total[...] if sums is None else total[...] + sums[...].astype(jnp.float32)
        out[...] = found.astype(out.dtype)


def _within(rows: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """rows [rows, features], zero but from `start` to before `end`."""
    row = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where((row >= start) & (row < end), rows.astype(jnp.float32), 0.0).astype(rows.dtype)


def _finite(x: jax.Array) -> jax.Array:
    """x, with its dtype's largest number for what is not finite."""
    most = float(jnp.finfo(x.dtype).max)
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) <= most, wide, most).astype(x.dtype)
