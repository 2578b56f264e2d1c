"""The grouped product of `ttpu_jax.ops.grouped` as Pallas kernels for a TPU, after megablox (arXiv 2211.15841).

A kernel visits each pair of a block of rows and a group that has rows in it, and keeps what it computed for those rows.
megablox derives the list of visits by histograms, scatters and a loop, fifty small programs that take 0.1 ms on a v5e,
longer than a decode step's products for one layer; here comparisons of small tables give it in five."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_BLOCK_BYTES = 2 << 20
"""Of a kernel's block: with two in flight, rows, result and accumulator, well within a TPU core's 16 MiB of VMEM."""


def product(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, contract: int, interpret: bool = False) -> jax.Array:
    """x [rows, in] times its group's kernel, whose axis `contract` (0 or 1) is [in]: [rows, out] in x's dtype.

    Rows after the last group are left as they were in memory."""
    if _stored_transposed(kernels):
        kernels, contract = kernels.swapaxes(1, 2), 1 - contract
    rows, inner, outer = len(x), x.shape[1], kernels.shape[2 - contract]
    padded, block_rows = _pad_rows(x, len(sizes))
    block_in = _block(inner, 2048)
    block_out = _block(outer, _BLOCK_BYTES // (block_in * kernels.dtype.itemsize))
    group, tile, starts, ends, count = _visits(sizes, len(padded), block_rows)
    steps = pl.cdiv(inner, block_in)
    kernel_block = (None, block_out, block_in) if contract == 1 else (None, block_in, block_out)

    def kernel_index(n: int, visit: int, k: int, group: jax.Array, *_: jax.Array) -> tuple[jax.Array, int, int]:
        return (group[visit], n, k) if contract == 1 else (group[visit], k, n)

    call = pl.pallas_call(
        partial(_visit, contract=contract, block_rows=block_rows, steps=steps),
        out_shape=jax.ShapeDtypeStruct((len(padded), outer), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(outer, block_out), count, steps),
            in_specs=[
                pl.BlockSpec((block_rows, block_in), lambda n, visit, k, group, tile, *_: (tile[visit], k)),
                pl.BlockSpec(kernel_block, kernel_index),
            ],
            out_specs=pl.BlockSpec((block_rows, block_out), lambda n, visit, k, group, tile, *_: (tile[visit], n)),
            scratch_shapes=[pltpu.VMEM((block_rows, block_out), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * outer,
            bytes_accessed=x.nbytes + rows * outer * x.dtype.itemsize + kernels.nbytes,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_product",
    )
    return call(group, tile, starts, ends, padded, kernels)[:rows]


def kernel_gradient(
    x: jax.Array, gradient: jax.Array, sizes: jax.Array, kernels: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The sum of gradient [rows, out] times x [rows, in] over each group's rows, as `kernels` [groups, out, in]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    swap = _stored_transposed(kernels)
    (x, block_rows), (gradient, _) = _pad_rows(x, len(sizes)), _pad_rows(gradient, len(sizes))
    left, right = (x, gradient) if swap else (gradient, x)
    tiling = (block_rows, _block(left.shape[1], 512), _block(right.shape[1], 512))
    total = tgmm(left.swapaxes(0, 1), right, sizes, kernels.dtype, tiling, interpret=interpret)
    return total.swapaxes(1, 2) if swap else total


def _visit(
    group_of: jax.Array,
    tile_of: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    out: jax.Array,
    total: jax.Array,
    *,
    contract: int,
    block_rows: int,
    steps: int,
) -> None:
    """One block of rows by one block of its group's kernel; the blocks along [in] come one after the other."""
    visit, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += jax.lax.dot_general(
        x[...], kernel[...], (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
    )

    @pl.when(step == steps - 1)
    def _() -> None:
        group = group_of[visit]
        row = tile_of[visit] * block_rows + jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
        mine = (row >= starts[group]) & (row < ends[group])
        out[...] = jnp.where(mine, total[...], out[...].astype(jnp.float32)).astype(out.dtype)


def _visits(sizes: jax.Array, rows: int, block: int) -> tuple[jax.Array, ...]:
    """Group and block of rows of every visit, the first row of each group and the row after its last, and the number
    of visits. A block is visited by the groups in it one after the other, so that it stays on the chip meanwhile."""
    groups = jnp.arange(len(sizes))
    before = groups[:, None] >= groups  # a sum over these is a cumulative sum, in one small program
    ends = jnp.where(before, sizes, 0).sum(1)
    starts = ends - sizes
    first = starts // block
    counts = jnp.where(sizes > 0, (ends + block - 1) // block - first, 0)
    last = jnp.where(before, counts, 0).sum(1)
    visits = jnp.arange(rows // block + len(sizes) - 1)[:, None]
    mine = (visits < last) & (visits >= last - counts)
    group = jnp.where(mine, groups, 0).sum(1)
    tile = jnp.where(mine, first - last + counts + visits, 0).sum(1)
    return group.astype(jnp.int32), tile.astype(jnp.int32), starts, ends, last[-1]


def _stored_transposed(kernels: jax.Array) -> bool:
    """Whether kernels [groups, out, in] lie in a TPU's memory as [groups, in, out]: the layout that it gives to arrays
    whose last dimension would be padded to whole tiles of 128 lanes, and whose last but one would not."""
    _, outer, inner = kernels.shape
    return inner % LANES != 0 and outer % LANES == 0


def _pad_rows(x: jax.Array, groups: int) -> tuple[jax.Array, int]:
    """x with rows up to a multiple of the block that is returned: 256 rows where groups are large, else up to 128."""
    rows = len(x)
    block = 256 if rows >= 256 * groups else min(128, -(-rows // 16) * 16)
    return jnp.pad(x, ((0, -rows % block), (0, 0))), block


def _block(size: int, limit: int) -> int:
    """All of `size`, or a multiple of the lanes that divides it and is at most `limit` (at least one vector of lanes)."""
    if size <= limit or size % LANES:
        return size
    limit = max(limit // LANES * LANES, LANES)
    return next(block for block in range(limit, 0, -LANES) if size % block == 0)
