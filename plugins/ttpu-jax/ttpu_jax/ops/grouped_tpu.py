"""The grouped product of `ttpu_jax.ops.grouped` as Pallas kernels for a TPU, after megablox (arXiv 2211.15841).

A kernel visits each pair of a block of rows and a group that has rows in it, and keeps what it computed for those rows.
megablox derives the list of visits by histograms, scatters and a loop: some fifty small programs, a third of the
0.16 ms that a v5e was predicted to take beside the products for a layer of Qwen3-30B-A3B's decode step. Here
comparisons of small tables give it in a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import ActivationSpec
from ttpu_core.spec.arithmetic import product_flops
from ttpu_jax.ops.activation import gated_activation

SUBLANES, LANES = 8, 128
_BLOCK_BYTES = 2 << 20
"""Of a kernel's block: with two in flight, rows, result and accumulator, well within a TPU core's 16 MiB of VMEM."""


def product(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, contract: int, interpret: bool = False) -> jax.Array:
    """Each row of x times its group's kernel, in x's dtype. Rows after the last group are uninitialised.

    Args:
        x: [rows, in] for `contract` 1, [rows, out] for `contract` 0.
        kernels: [groups, *out, in].
        sizes: [groups], the number of rows of each group.
        contract: the kernel axis that is contracted: 1 for the product, 0 for the gradient of x.
        interpret: run the kernel in the interpreter.

    Returns:
        [rows, out] for `contract` 1, [rows, in] for `contract` 0.
    """
    if stored_transposed(kernels):
        kernels, contract = kernels.swapaxes(1, 2), 1 - contract
    kernels = kernels.reshape(len(kernels), -1, kernels.shape[-1])
    rows, inner, outer = len(x), x.shape[1], kernels.shape[2 - contract]
    block_in = block_of(inner, 2048, whole=True)
    block_out = block_of(outer, _BLOCK_BYTES // (block_in * kernels.dtype.itemsize))

    def kernel_index(n: int, visit: int, k: int, group: jax.Array, *_: jax.Array) -> tuple[jax.Array, int, int]:
        return (group[visit], n, k) if contract == 1 else (group[visit], k, n)

    def add(x: jax.Array, kernel: jax.Array, total: Any) -> None:
        total[...] += jax.lax.dot_general(
            x[...], kernel[...], (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
        )

    kernel_block = (None, block_out, block_in) if contract == 1 else (None, block_in, block_out)
    return visit_groups(
        add,
        x,
        sizes,
        [(kernels, pl.BlockSpec(kernel_block, kernel_index))],
        jax.ShapeDtypeStruct((rows, outer), x.dtype),
        (block_in, block_out),
        kernel_bytes=kernels.nbytes,
        name="grouped_product",
        interpret=interpret,
    )


def gated_product(
    x: jax.Array,
    kernels: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    activation: ActivationSpec,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Each row's activated gate, times its other product, times its weight, in x's dtype; rounded once, at the end.
    Rows after the last group are uninitialised.

    Args:
        x: [rows, in].
        kernels: [groups, 2, out, in], the gate first.
        weight: [rows].
        sizes: [groups], the number of rows of each group.
        activation: of the gate.
        interpret: run the kernel in the interpreter.

    Returns:
        [rows, out].
    """
    (_, halves, outer, inner), rows = kernels.shape, len(x)
    block_in = block_of(inner, 2048, whole=True)
    block_out = block_of(outer, _BLOCK_BYTES // (halves * block_in * kernels.dtype.itemsize))

    def add(x: jax.Array, kernel: Any, _: jax.Array, total: Any) -> None:
        for half in range(halves):
            total[half] += jax.lax.dot_general(
                x[...], kernel[half], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )

    def finish(total: Any, _: Any, weight: Any) -> jax.Array:
        return gated_activation(total[0], total[1], activation) * _column(weight[...])

    of_kernels = pl.BlockSpec(
        (None, halves, block_out, block_in), lambda n, visit, k, group, *_: (group[visit], 0, n, k)
    )
    return visit_groups(
        add,
        x,
        sizes,
        [(kernels, of_kernels)],
        jax.ShapeDtypeStruct((rows, outer), x.dtype),
        (block_in, block_out),
        kernel_bytes=kernels.nbytes,
        name="grouped_gate",
        interpret=interpret,
        weight=weight,
        halves=halves,
        finish=finish,
    )


def _column(row: jax.Array) -> jax.Array:
    """[1, size] → [size, 1]."""
    size = row.shape[1]
    place, other = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(place == other, row, 0.0).sum(1, keepdims=True)


def visit_groups(
    add: Callable[..., None],
    x: jax.Array,
    sizes: jax.Array,
    operands: Sequence[tuple[jax.Array, pl.BlockSpec]],
    out: jax.ShapeDtypeStruct,
    blocks: tuple[int, int],
    *,
    kernel_bytes: int,
    name: str,
    interpret: bool,
    weight: jax.Array | None = None,
    halves: int = 1,
    finish: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Run a kernel for each block of rows with each group that has rows in it, block by block of outputs and of inputs.

    Args:
        add: called in the kernel with a block of rows, a block of each operand, and the float32 sums that it adds to.
        x: [rows, in].
        sizes: [groups], the number of rows of each group.
        operands: arrays with a leading axis of groups, and their blocks, whose index is a function of (block of
            outputs, visit, block of inputs, group of each visit, ...).
        out: [rows, out] and the dtype of the result.
        blocks: inputs and outputs of a block.
        kernel_bytes: that are read if every group has rows.
        name: of the kernel.
        interpret: run the kernel in the interpreter.
        weight: [rows], of which a block, float32 [1, rows of a block], is the last operand; None adds none.
        halves: if above 1, the sums are so many [halves, rows, outputs].
        finish: called with the sums and a block of each operand, for what is written of them; None writes the sums.

    Returns:
        As `out`. Rows after the last group are uninitialised.
    """
    (rows, inner), (block_in, block_out), outer = x.shape, blocks, out.shape[1]
    padded, block_rows = pad_rows(x, len(sizes))
    group, tile, starts, ends, count = visits_of(sizes, len(padded), block_rows)
    steps = inner // block_in
    operands, block = list(operands), (block_rows, block_out)
    if weight is not None:
        by_block = jnp.pad(weight.astype(jnp.float32), (0, len(padded) - rows)).reshape(-1, 1, block_rows)
        of_weight = pl.BlockSpec((None, 1, block_rows), lambda n, visit, k, group, tile, *_: (tile[visit], 0, 0))
        operands.append((by_block, of_weight))
    call = pl.pallas_call(
        partial(_visit, add=add, finish=finish, block_rows=block_rows, steps=steps),
        out_shape=jax.ShapeDtypeStruct((len(padded), outer), out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(outer, block_out), count, steps),
            in_specs=[
                pl.BlockSpec((block_rows, block_in), lambda n, visit, k, group, tile, *_: (tile[visit], k)),
                *(block for _, block in operands),
            ],
            out_specs=pl.BlockSpec(block, lambda n, visit, k, group, tile, *_: (tile[visit], n)),
            scratch_shapes=[pltpu.VMEM(block if halves == 1 else (halves, *block), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=int(product_flops(halves * inner * outer, rows)),
            bytes_accessed=x.nbytes + rows * outer * x.dtype.itemsize + kernel_bytes,
            transcendentals=rows * outer if finish else 0,
        ),
        interpret=interpret,
        name=name,
    )
    return call(group, tile, starts, ends, padded, *(array for array, _ in operands))[:rows]


def _visit(
    group_of: jax.Array,
    tile_of: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *blocks: Any,
    add: Callable[..., None],
    finish: Callable[..., jax.Array] | None,
    block_rows: int,
    steps: int,
) -> None:
    """One block of rows by one block of its group's kernel; the blocks along [in] come one after the other."""
    *operands, out, total = blocks
    visit, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    add(*operands, total)

    @pl.when(step == steps - 1)
    def _() -> None:
        group = group_of[visit]
        row = tile_of[visit] * block_rows + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
        mine = (row >= starts[group]) & (row < ends[group])
        found = total[...] if finish is None else finish(total, *operands[1:])
        out[...] = jnp.where(mine, found, out[...].astype(jnp.float32)).astype(out.dtype)


def visits_of(sizes: jax.Array, rows: int, block: int, *, every: bool = False) -> tuple[jax.Array, ...]:
    """The visits of a kernel that goes through blocks of rows. The groups in a block visit it one after the other, so
    that it stays on the chip meanwhile.

    Args:
        sizes: int32 [groups], the rows of each group.
        rows: number of rows in all.
        block: rows of a block.
        every: a group without rows has a visit too.

    Returns:
        The group and the block of each visit, int32 [visits]; the first row of each group and the row after its last,
        int32 [groups]; the number of visits, a scalar.
    """
    groups = jnp.arange(len(sizes))
    before = groups[:, None] >= groups  # a sum over these is a cumulative sum, in one small program
    ends = jnp.where(before, sizes, 0).sum(1)
    starts = ends - sizes
    first = jnp.minimum(starts // block, rows // block - 1)  # a last group without rows starts behind all blocks
    counts = jnp.where(sizes > 0, (ends + block - 1) // block - first, int(every))
    last = jnp.where(before, counts, 0).sum(1)
    visits = jnp.arange(rows // block + len(sizes) - 1)[:, None]
    mine = (visits < last) & (visits >= last - counts)
    group = jnp.where(mine, groups, 0).sum(1)
    tile = jnp.where(mine, first - last + counts + visits, 0).sum(1)
    return group.astype(jnp.int32), tile.astype(jnp.int32), starts, ends, last[-1]


def stored_transposed(kernels: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether kernels [groups, out, in] lie in a TPU's memory as [groups, in, out], which is where the padding to whole
    tiles of 8 sublanes by 128 lanes takes less (as libtpu 0.0.42 decides it; a wrong guess costs a copy)."""
    if kernels.ndim != 3:
        return False
    _, outer, inner = kernels.shape
    return _padded(inner, outer) < _padded(outer, inner)


def _padded(rows: int, columns: int) -> int:
    return -(-rows // SUBLANES) * SUBLANES * -(-columns // LANES) * LANES


def pad_rows(x: jax.Array, groups: int) -> tuple[jax.Array, int]:
    """Pad the rows of x [rows, in] with zeros to a multiple of a block: of 256 rows where groups are large, else of up
    to 128. Returns [padded rows, in] and the block."""
    rows, tile = len(x), 32 if x.dtype.itemsize == 1 else 16
    block = 256 if rows >= 256 * groups else min(128, -(-rows // tile) * tile)
    return jnp.pad(x, ((0, -rows % block), (0, 0))), block


def block_of(size: int, limit: int, *, whole: bool = False) -> int:
    """All of `size`, or a multiple of the lanes that is at most `limit` (but at least the lanes) and divides `size`, if
    one more than half as large does or if it must leave nothing over (`whole`)."""
    if size <= limit or (whole and size % LANES):
        return size
    limit = max(limit // LANES * LANES, LANES)
    blocks = range(limit, 0 if whole else limit // 2, -LANES)
    return next((block for block in blocks if size % block == 0), limit)
