"""A Pallas kernel for TPUs that multiplies activations by a kernel with a scale per group of inputs. XLA would write
the dequantized kernel to HBM and read it again; here blocks of values become bfloat16 in VMEM.

Groups are scaled after their products, where a few rows of partial sums are less work than the kernel's weights. So
that each product fills the multiplier, one takes the inputs of several groups (a span): its rows are the activations
once per group, with zeros outside the group.

To make bfloat16 of 4-bit values takes longer than to read them. So where rows are few, integers are multiplied as
integers: the activations of a row are written in steps of 2**-14 of the largest of them (of a block of inputs), as two
int8 digits, which have rows of their own in the product."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec.arithmetic import product_flops
from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.ops.matmul.pallas_blocks import SUBLANES, Blocks, bits_of, blocks_for

SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
"""Dtypes of scales that the kernel reads; others are converted before."""


def weight_only_product(
    x: jax.Array, kernel: QuantizedKernel, out_dtype: Any, *, kind: str, interpret: bool = False
) -> jax.Array:
    """x [..., in] times a kernel [*out, in]: [..., *out] in `out_dtype`. Sums are float32.

    Args:
        x: [..., in], bfloat16 or float32, in which the product's operands are.
        kernel: values [*out, in], scale and zero point [*out, groups] or [*out].
        out_dtype: of the result.
        kind: `jax.Device.device_kind`, which selects the blocks.
        interpret: run the kernel in the interpreter.

    Raises:
        NotImplementedError: no block of inputs consists of whole groups and whole registers (see `blocks_for`).
    """
    if kernel.input_order is not None:
        x = jnp.take(x, kernel.input_order, axis=-1)
    inputs = x.shape[-1]
    rows = x.reshape(-1, inputs)
    values = kernel.values.reshape(-1, inputs)
    blocks = blocks_for(kind, len(rows), len(values), inputs, kernel.format.group_size, kernel.dtype, x.dtype)
    group = kernel.format.group_size
    scale = _by_group(kernel.scale, inputs, group)
    zero = None if kernel.zero_point is None else _by_group(kernel.zero_point, inputs, group)
    product = _product(rows, values, scale, zero, blocks, out_dtype, interpret)
    return product.reshape(*x.shape[:-1], *kernel.shape[:-1])


def _by_group(part: jax.Array, inputs: int, group: int | None) -> jax.Array:
    """[*out, groups] → [groups, out]. XLA:TPU stores an array whose last dimension is short transposed, so that this
    costs nothing there."""
    return part.reshape(-1, 1 if group is None else inputs // group).swapaxes(0, 1)


def _product(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    blocks: Blocks,
    out_dtype: Any,
    interpret: bool,
) -> jax.Array:
    """x [rows, in], values [out, in], scale and zero [groups, out]: [rows, out]."""
    (rows, inputs), out = x.shape, len(values)
    steps = inputs // blocks.inputs
    x = jnp.pad(x, ((0, -rows % blocks.rows), (0, 0)))
    row_blocks = len(x) // blocks.rows
    of_scale = pl.BlockSpec((blocks.groups, blocks.out), lambda r, n, k: (k, n))
    operands = [x, values, _readable(scale, blocks)]
    specs = [
        pl.BlockSpec((blocks.rows, blocks.inputs), lambda r, n, k: (r, k)),
        pl.BlockSpec((blocks.out, blocks.inputs), lambda r, n, k: (n, k)),
        of_scale,
    ]
    if zero is not None:
        by_group = x.astype(jnp.float32).reshape(row_blocks, blocks.rows, steps, blocks.groups, -1)
        sums = by_group.sum(-1).swapaxes(1, 2)
        operands += [_readable(zero.astype(jnp.bfloat16), blocks), sums]  # int8 is exact in bfloat16
        specs += [of_scale, pl.BlockSpec((None, None, blocks.rows, blocks.groups), lambda r, n, k: (r, k, 0, 0))]
    call = pl.pallas_call(
        partial(_multiply, blocks=blocks, steps=steps),
        out_shape=jax.ShapeDtypeStruct((len(x), out), out_dtype),
        grid=(row_blocks, pl.cdiv(out, blocks.out), steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((blocks.rows, blocks.out), lambda r, n, k: (r, n)),
        scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.out), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=int(product_flops(values.size, rows)),
            bytes_accessed=sum(one.size * bits_of(one.dtype) for one in operands) // 8
            + rows * out * bits_of(out_dtype) // 8,
            transcendentals=0,
        ),
        interpret=interpret,
        name="weight_only_product",
    )
    return call(*operands)[:rows]


def _readable(part: jax.Array, blocks: Blocks) -> jax.Array:
    """Scales or zero points in a dtype of which the kernel can read a block."""
    whole = part.dtype == jnp.float32 or blocks.groups % (2 * SUBLANES) == 0 or blocks.groups == len(part)
    return part if part.dtype in SCALE_DTYPES and whole else part.astype(jnp.float32)


def _multiply(x: Any, values: Any, scale: Any, *rest: Any, blocks: Blocks, steps: int) -> None:
    """One block of the kernel. x [rows, in], values [out, in], scale [groups, out]; for zero points also zero [groups,
    out] and the sums of x's groups [rows, groups]."""
    (*zeros, out, total), step = rest, pl.program_id(2)
    scales = scale[...].astype(jnp.float32)
    one_scale = blocks.groups == 1 and blocks.group > blocks.span
    digits = _Digits(x) if blocks.digits else None
    more = jnp.zeros(total.shape, jnp.float32)
    for start in range(0, blocks.inputs, blocks.span):
        columns = slice(start, start + blocks.span)
        if digits is not None:
            partial_sums = digits.product(columns, values[:, columns], blocks)
        else:
            partial_sums = _floats_product(x[:, columns], values[:, columns], blocks)
        for mask, sums in enumerate(partial_sums):
            row = (start + mask * blocks.group) // blocks.group
            more += sums if one_scale else sums * scales[row : row + 1]
    if one_scale:
        more = more * scales
    if digits is not None:
        more = more * digits.step
    if zeros:
        zero, sums = zeros
        more -= jax.lax.dot_general(
            sums[...],
            scales * zero[...].astype(jnp.float32),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
        )
    if steps == 1:
        out[...] = more.astype(out.dtype)
        return

    @pl.when(step == 0)
    def _() -> None:
        total[...] = more

    @pl.when(step > 0)
    def _() -> None:
        total[...] += more

    @pl.when(step == steps - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _floats_product(x: jax.Array, values: jax.Array, blocks: Blocks) -> list[jax.Array]:
    """Sums of each group of a span: float32 [rows, out]. x [rows, span], values [out, span]."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if blocks.masks > 1:
        x = _masked([x.astype(jnp.float32)], blocks).astype(x.dtype)
    sums = jax.lax.dot_general(
        x, values.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
    )
    return [sums[mask * blocks.rows : (mask + 1) * blocks.rows] for mask in range(blocks.masks)]


class _Digits:
    """Activations x [rows, in] ≈ step * (128 * high + low), with the digits in int8."""

    def __init__(self, x: Any) -> None:
        wide = x[...].astype(jnp.float32)
        largest = jnp.abs(wide).max(1, keepdims=True)
        self.step = jnp.where(largest == 0, 1.0, largest / (127 * 128))  # NaN remains
        whole = jnp.floor(wide / self.step + 0.5).astype(jnp.int32)
        self.high = (whole + 64) >> 7
        self.low = whole - (self.high << 7)

    def product(self, columns: slice, values: jax.Array, blocks: Blocks) -> list[jax.Array]:
        """`_floats_product` in steps, of columns of x."""
        x = _masked([self.high[:, columns], self.low[:, columns]], blocks).astype(jnp.int8)
        sums = jax.lax.dot_general(
            x, values.astype(jnp.int8), (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        count = blocks.rows
        pairs = range(0, 2 * blocks.masks * count, 2 * count)
        return [(128 * sums[at : at + count] + sums[at + count : at + 2 * count]).astype(jnp.float32) for at in pairs]


def _masked(parts: list[jax.Array], blocks: Blocks) -> jax.Array:
    """[masks * parts * rows, span]: each part [rows, span] once per group of the span, zero outside it."""
    if blocks.masks == 1:
        return jnp.concatenate(parts)
    group = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 1) // blocks.group
    return jnp.concatenate([jnp.where(group == mask, part, 0) for mask in range(blocks.masks) for part in parts])
