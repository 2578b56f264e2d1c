"""The grouped product of `ttpu_jax.ops.grouped` with quantized kernels as a Pallas kernel for a TPU. It reads the
values of the groups that have rows, and converts them where they are multiplied; scales and zero points are applied to
float32 sums."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttpu_jax.ops.grouped_tpu import LANES, SUBLANES, block_of, visit_groups
from ttpu_jax.ops.kernels import QuantizedKernel

_BLOCK_WEIGHTS = 1 << 20
"""Of a kernel's block: 2 MiB after their conversion to bfloat16."""


def product(
    x: jax.Array, kernels: QuantizedKernel, sizes: jax.Array, wide: bool = False, *, interpret: bool = False
) -> jax.Array:
    """Each row of x times its group's kernel. Rows after the last group are uninitialised.

    Args:
        x: [rows, in], in the order of the kernels' values; int8 to multiply by values of integers as integers.
        kernels: [groups, *out, in].
        sizes: [groups], the number of rows of each group.
        wide: the result is float32.
        interpret: run the kernel in the interpreter.

    Returns:
        [rows, out], in x's dtype unless `wide`.
    """
    rows, inner, count = len(x), x.shape[1], len(sizes)
    outer = prod(kernels.shape[1:-1])
    values = kernels.values.reshape(count, outer, inner)
    coded = kernels.coded or values.dtype == jnp.float4_e2m1fn  # no TPU of today converts 4-bit floats
    if coded and not kernels.coded:
        values = jax.lax.bitcast_convert_type(values, jnp.int4)
    scale, zero = (_by_scale(part, count, outer) for part in (kernels.scale, kernels.zero_point))
    assert scale is not None
    grouped, size = scale.shape[1] > 1, inner // scale.shape[1]
    block_in = block_of(inner, 2048, whole=True)
    if grouped and (block_in % size or block_in // size % SUBLANES):
        block_in = inner  # a block holds whole groups, and scales of whole tiles or all
    block_out = block_of(outer, _BLOCK_WEIGHTS // block_in)
    of_values = pl.BlockSpec((None, block_out, block_in), lambda n, visit, k, group, *_: (group[visit], n, k))
    of_scale = pl.BlockSpec(
        (None, block_in // size if grouped else 1, block_out),
        lambda n, visit, k, group, *_: (group[visit], k if grouped else 0, n),
    )
    return visit_groups(
        partial(_add, size=size, coded=coded),
        x,
        sizes,
        [(values, of_values), (scale, of_scale), *(() if zero is None else ((zero, of_scale),))],
        jax.ShapeDtypeStruct((rows, outer), jnp.float32 if wide else x.dtype),
        (block_in, block_out),
        kernel_bytes=_stored_bytes(values) + scale.nbytes,
        name="grouped_quantized_product",
        interpret=interpret,
    )


def _by_scale(part: jax.Array | None, count: int, outer: int) -> jax.Array | None:
    """[groups, *out] or [groups, *out, scales] → float32 [groups, scales, out], along a result's channels."""
    return None if part is None else part.reshape(count, outer, -1).astype(jnp.float32).swapaxes(1, 2)


def _stored_bytes(values: jax.Array) -> int:
    return values.size // 2 if values.dtype == jnp.int4 else values.size


def _add(x: Any, values: Any, scale: Any, *rest: Any, size: int, coded: bool) -> None:
    """Add the product of a block of rows with a block of its group's kernel to the sums, the last of `rest`."""
    *of_zero, total = rest
    integers = x.dtype == jnp.int8
    width = x.shape[1]
    span = width
    if size < width and (size % LANES == 0 or LANES % size == 0):
        span = max(size, LANES)
    for at in range(0, width, span):
        end = min(at + span, width)
        rows = x[:, at:end]
        weights = values[:, at:end].astype(jnp.int8) if integers else _converted(values[:, at:end], x.dtype, coded)
        for first in range(at, end, size):
            mine = rows
            if size < end - at:  # slices of fewer features than there are lanes are not aligned
                feature = at + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
                held = rows.astype(jnp.int32) if integers else rows
                mine = jnp.where((feature >= first) & (feature < first + size), held, jnp.zeros_like(held))
                mine = mine.astype(rows.dtype)
            exact = jnp.int32 if integers else jnp.float32
            sums = jax.lax.dot_general(mine, weights, (((1,), (1,)), ((), ())), preferred_element_type=exact)
            sums = sums.astype(jnp.float32)
            row = first // size
            for zero in of_zero:
                ones = mine.astype(jnp.float32).sum(1, keepdims=True)
                sums = sums - ones * zero[row : row + 1, :]
            total[...] += sums * scale[row : row + 1, :]


def _converted(values: jax.Array, dtype: jnp.dtype, coded: bool) -> jax.Array:
    """The values in the dtype of the activations; `coded`: of int4 that are the bits of float4_e2m1fn."""
    if not coded:
        return values.astype(jnp.float32).astype(dtype)
    bits = values.astype(jnp.int32)
    code = bits & 7  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    magnitude = jnp.where(code < 4, 0.5 * code, jnp.where(code == 7, 6.0, code - 2.0))
    return jnp.where(bits < 0, -magnitude, magnitude).astype(dtype)
