"""Products with quantized kernels that XLA compiles by itself. On one device, the formulation depends on the platform
and on the number of rows; across devices, it is one that GSPMD partitions.

A scale per output channel is applied to the sums. For scales per group of inputs there are four formulations, chosen
by what the compiler estimates for 4096 × 14336 int4 in groups of 128 (libtpu 0.0.42; bfloat16 takes 168, 307 and
2710 µs for 8, 256 and 4096 rows on a v5e):

- `_over_spans` with several groups at a time, for few rows: 113 µs for 8 rows.
- `_over_spans` with one group at a time: 418 µs for 256 rows.
- The dequantized kernel, for many rows: 3469 µs for 4096 rows, but 1272 and 1303 µs for 8 and 256, because XLA writes
  it out.
- `_over_channels` on a CPU, which converts a block of the kernel that stays in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.ops.kernels import QuantizedKernel, grouped_values
from ttpu_jax.ops.matmul.activations import quantize_activations
from ttpu_jax.ops.matmul.dense import Product, dense_product
from ttpu_jax.ops.matmul.pallas_blocks import block_table
from ttpu_jax.ops.matmul.shards import product_of_shards

LANES = 128
SPAN_ROWS = 128
"""Most rows of a product over several groups, in which each row stands once for each group."""
LOOP_ROWS = 512
"""Most rows for which a loop over groups, which adds up all results once per group, beats writing the kernel out."""
CPU_BLOCK = {True: 3 << 15, False: 1 << 19}
"""Weights of a block, for a single row and for more: the fastest of powers of two times 768 on a Xeon at 2.5 GHz with
2 MiB of L2 cache for two cores. int8 takes 0.77 times as long as bfloat16 for a single row, 0.9 for 8."""


def product(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product) -> jax.Array:
    """x [..., in] times the kernel [*out, in], plus bias [*out]: [..., *out]. The only rounding but those of sums is to
    x's dtype, of a dequantized kernel in groups (never on a CPU), and of the result."""
    if kernel.input_order is not None:
        x, kernel = jnp.take(x, kernel.input_order, axis=-1), replace(kernel, input_order=None)
    if _is_of_shards(kernel, how):
        return _of_shards(x, kernel, bias, how)
    out_shape = (*x.shape[:-1], *kernel.shape[:-1])
    rows = x.reshape(-1, x.shape[-1])
    if how.flatten:
        kernel, bias = _flat(kernel), None if bias is None else bias.reshape(-1)
    step = None
    if kernel.format.activation is not None:
        rows, step = quantize_activations(rows, kernel.format.activation, kernel.input_scale)
    sums = _sums(rows, kernel, x.dtype, how)
    if step is not None:
        sums = sums * step.reshape(*step.shape[:-1], *(1,) * (sums.ndim - 1)) if step.ndim else sums * step
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    return sums.astype(how.out_dtype).reshape(out_shape)


def _is_of_shards(kernel: QuantizedKernel, how: Product) -> bool:
    """Whether each device multiplies by its own shard of a kernel with scales per channel. Where devices share the
    inputs, GSPMD would have them exchange sums before they are scaled: int32 or float32, twice the bytes of bfloat16.
    Where they share the outputs of a product of two quantized operands, it would gather a cut residual stream before it
    is rounded; and of stacked kernels [layers, heads, slots, features, in], XLA:TPU would copy all in every turn of
    the loop over layers, because it keeps the dimensions of outputs apart."""
    form, devices = kernel.format, how.devices
    if devices is None or devices.mesh is None or how.platform == "cpu" or form.group_size is not None:
        return False
    return form.activation is not None or bool(devices.kernel_axes[-1])


def _of_shards(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, how: Product) -> jax.Array:
    """`product` where each device multiplies by its shard of the kernel and scales its sums before devices exchange
    them, in the result's dtype."""
    assert how.devices is not None
    values, step = x, None
    if kernel.format.activation is not None:
        values, step = quantize_activations(x, kernel.format.activation, kernel.input_scale)
        if not step.ndim:
            step = jnp.broadcast_to(step, (*x.shape[:-1], 1))
    integers = bool(block_table(how.devices.kind)["digit_rows"])

    def multiply(values: jax.Array, step: jax.Array | None, kernel: QuantizedKernel, dtype: Any) -> jax.Array:
        rows, out = values.reshape(-1, values.shape[-1]), kernel.shape[:-1]
        if kernel.ndim > 3:  # a pair of wide outputs stays apart: XLA:TPU would have to move the halves of each row
            kernel = _flat(kernel)
        operand = x.dtype
        if not integers and rows.dtype == jnp.int8:  # exact in bfloat16
            rows = rows.astype(jnp.bfloat16)
            operand = jnp.dtype(jnp.bfloat16)
        wide = replace(how, out_dtype=jnp.dtype(jnp.float32), flatten=False, devices=None)
        sums = _by_channel(rows, kernel, operand, wide)
        if step is not None:
            sums = sums * step.reshape(-1, *(1,) * (kernel.ndim - 1))
        return sums.astype(dtype).reshape(*values.shape[:-1], *out)

    sums = product_of_shards(
        multiply,
        values,
        step,
        replace(kernel, input_scale=None),
        how.devices,
        dtype=how.out_dtype if bias is None else jnp.float32,
        exchanged=how.out_dtype,
    )
    return sums if bias is None else (sums + bias.astype(jnp.float32)).astype(how.out_dtype)


def _sums(rows: jax.Array, kernel: QuantizedKernel, dtype: Any, how: Product) -> jax.Array:
    """float32 [rows, *out] from rows [rows, in], which may be quantized; `dtype` is that of the activations."""
    wide = replace(how, out_dtype=jnp.dtype(jnp.float32))
    if how.platform == "cpu":
        rows = rows.astype(jnp.float32)
        return _over_channels(rows, kernel) if how.flatten else dense_product(rows, _weights(kernel), None, wide)
    if kernel.format.group_size is None:
        return _by_channel(rows, kernel, dtype, wide)
    groups, size = kernel.scale.shape[-1], kernel.format.group_size
    span = _span(len(rows), groups) if how.flatten else 1
    if how.flatten and span * size % LANES == 0 and (span > 1 or size >= LANES) and len(rows) <= LOOP_ROWS:
        return _over_spans(rows, kernel, dtype, span)
    return dense_product(rows.astype(dtype), _weights(kernel).astype(dtype), None, wide)


def _weights(kernel: QuantizedKernel) -> jax.Array:
    """float32 [*out, in], in the order of the values."""
    weights = grouped_values(kernel, jnp.float32)
    scale = kernel.scale.astype(jnp.float32).reshape(*weights.shape[:-1], 1)
    return (weights * scale).reshape(kernel.shape)


def _by_channel(rows: jax.Array, kernel: QuantizedKernel, dtype: Any, how: Product) -> jax.Array:
    """Scales and zero points are applied to the sums: exact, since the values are exact in bfloat16."""
    scale, zero = kernel.scale.astype(jnp.float32), kernel.zero_point
    if rows.dtype == jnp.int8 and kernel.format.dtype.startswith("int"):
        sums = _dot(rows, kernel.values, jnp.int32)
        if zero is not None:
            ones = rows.astype(jnp.int32).sum(-1).reshape(-1, *(1,) * zero.ndim)
            sums = sums - ones * zero.astype(jnp.int32)
        return sums.astype(jnp.float32) * scale
    if rows.dtype == kernel.values.dtype:  # float8 by float8
        return _dot(rows, kernel.values, jnp.float32) * scale
    return dense_product(rows.astype(dtype), kernel.values.astype(dtype), None, how, scale=scale, offset=zero)


def _over_spans(rows: jax.Array, kernel: QuantizedKernel, dtype: Any, span: int) -> jax.Array:
    """A loop over spans of neighbouring groups, each sliced out of the kernel where it lies. The rows of a span stand
    once for each of its groups, with the features of the others zeroed, so that one product gives every group's sums,
    which are scaled before they are added: nothing is rounded, and the kernel is read once."""
    groups, count = kernel.scale.shape[-1], len(rows)
    size = rows.shape[-1] // groups
    whole = rows.dtype == jnp.int8 and kernel.format.dtype.startswith("int") and span == 1
    operand, total = (jnp.int8, jnp.int32) if whole else (dtype, jnp.float32)
    scale = kernel.scale.astype(jnp.float32).T
    own = jnp.eye(span, dtype=bool)[:, None, :, None]

    def add(index: jax.Array, sums: jax.Array) -> jax.Array:
        features = jax.lax.dynamic_slice_in_dim(rows, index * span * size, span * size, 1).astype(operand)
        values = jax.lax.dynamic_slice_in_dim(kernel.values, index * span * size, span * size, 1)
        if span > 1:
            features = jnp.where(own, features.reshape(1, count, span, size), 0).reshape(span * count, span * size)
        values = values if whole else values.astype(operand)
        parts = _dot(features, values, total).astype(jnp.float32).reshape(span, count, -1)
        return sums + (parts * jax.lax.dynamic_slice_in_dim(scale, index * span, span)[:, None]).sum(0)

    steps = groups // span
    sums = jnp.zeros((count, len(kernel.values)), jnp.float32)
    unroll = next(n for n in ((4, 2, 1) if span == 1 else (2, 1)) if steps % n == 0)
    sums = jax.lax.fori_loop(0, steps, add, sums, unroll=unroll)
    if kernel.zero_point is None:
        return sums
    ones = rows.astype(jnp.float32).reshape(count, groups, size).sum(-1)
    offsets = kernel.scale.astype(jnp.float32) * kernel.zero_point.astype(jnp.float32)
    return sums - jax.lax.dot_general(ones, offsets, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _span(rows: int, groups: int) -> int:
    """The most groups at a time that divide all of them."""
    return next(span for span in range(min(groups, max(1, SPAN_ROWS // rows)), 0, -1) if groups % span == 0)


def _over_channels(rows: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """For XLA:CPU: a loop over blocks of output channels, which are converted to float32 one after the other. Of a
    whole kernel, a conversion would be written to memory and read again. rows: float32 [rows, in]."""
    channels, inputs = kernel.shape
    blocks = -(-channels // max(8, CPU_BLOCK[len(rows) == 1] // inputs))
    block = -(-channels // blocks)
    by_channel = kernel.format.group_size is None

    def sums_of(part: QuantizedKernel) -> jax.Array:
        if not by_channel:
            return _dot(rows, _weights(part), jnp.float32)
        values = grouped_values(part, jnp.float32).reshape(part.shape)
        return _dot(rows, values, jnp.float32) * part.scale.astype(jnp.float32)

    if blocks == 1:
        return sums_of(kernel)

    def put(index: jax.Array, sums: jax.Array) -> jax.Array:
        # The last block is moved up to end with the kernel: channels that it shares with the one before come out alike.
        start = jnp.minimum(index * block, channels - block)
        part = _map_channels(kernel, lambda array: jax.lax.dynamic_slice_in_dim(array, start, block))
        return jax.lax.dynamic_update_slice_in_dim(sums, sums_of(part), start, 1)

    return jax.lax.fori_loop(0, blocks, put, jnp.zeros((len(rows), channels), jnp.float32))


def _flat(kernel: QuantizedKernel) -> QuantizedKernel:
    """[*out, in] → [out, in]."""
    if kernel.ndim == 2:
        return kernel
    out = prod(kernel.shape[:-1])
    return _map_channels(kernel, lambda array: array.reshape(out, *array.shape[kernel.ndim - 1 :]))


def _map_channels(kernel: QuantizedKernel, make: Callable[[jax.Array], jax.Array]) -> QuantizedKernel:
    """The kernel with the arrays that have output channels replaced."""
    zero = kernel.zero_point
    values, scale = make(kernel.values), make(kernel.scale)
    return replace(kernel, values=values, scale=scale, zero_point=None if zero is None else make(zero))


def _dot(rows: jax.Array, kernel: jax.Array, total: Any) -> jax.Array:
    """rows [rows, in] times kernel [*out, in], summed in `total`."""
    dimensions = (((1,), (kernel.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=total)
