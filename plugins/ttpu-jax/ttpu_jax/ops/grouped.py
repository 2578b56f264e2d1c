"""Products in which each row has one of several kernels. `grouped_linear` takes rows sorted by group, kernels [groups,
*out, in] and the number of rows of each group, and returns [rows, out].

Kernels keep the layout in which they are stored. `jax.lax.ragged_dot` would copy all of them on a TPU, where it wants
[groups, in, out], also where few are read (7 ms for 0.75 GiB on a v5e, by libtpu 0.0.42's estimate), and on a CPU it
multiplies every row by every kernel; so a TPU runs Pallas kernels and a CPU a loop over blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.ops.attention.blocks import device_kind
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.kernels import Kernel, QuantizedKernel, dense
from ttpu_jax.ops.matmul import xla
from ttpu_jax.ops.matmul.activations import quantize_activations
from ttpu_jax.ops.matmul.dense import Product
from ttpu_jax.ops.matmul.pallas_blocks import block_table


def grouped_linear(
    x: jax.Array, kernels: Kernel, group_sizes: jax.Array, platform: str, input_axes: tuple[str, ...] = ()
) -> jax.Array:
    """Row r of x times the kernel of r's group, accumulated in float32.

    Args:
        x: [rows, in], those of the first group first.
        kernels: [groups, *out, in]: an array, or one of `ttpu_jax.ops.kernels`.
        group_sizes: int32 [groups]; their sum is at most rows.
        platform: cpu, tpu or gpu, where this runs; "tpu-interpreted" runs the TPU's kernels on a CPU.
        input_axes: mesh axes that shard `in`, inside a shard_map: a row that is quantized has one scale on all of them.

    Returns:
        [rows, out] in x's dtype, all output dimensions merged; differentiable in x and in kernels. Rows after the last
        group are undefined, perhaps not even numbers, and so is x's gradient there: to make them zero would take as
        long as to write them.
    """
    return _grouped(kernels, x, group_sizes, platform, input_axes)


@dataclass(frozen=True)
class SummedKernels:
    """Kernels whose gradient begins with that of other rows, to which a TPU adds it where it lies.

    kernels: [groups, *out, in], in the dtype of the rows.
    sums: [groups, *out, in], which have no gradient themselves.
    """

    kernels: jax.Array
    sums: jax.Array


@singledispatch
def _grouped(
    kernels: Any, x: jax.Array, sizes: jax.Array, platform: str, input_axes: tuple[str, ...] = ()
) -> jax.Array:
    return _dense(x, kernels.astype(x.dtype), sizes, None, platform)


@_grouped.register
def _(
    kernels: SummedKernels, x: jax.Array, sizes: jax.Array, platform: str, input_axes: tuple[str, ...] = ()
) -> jax.Array:
    return _dense(x, kernels.kernels, sizes, kernels.sums, platform)


@_grouped.register
def _(
    kernels: QuantizedKernel, x: jax.Array, sizes: jax.Array, platform: str, input_axes: tuple[str, ...] = ()
) -> jax.Array:
    return _quantized(x, kernels, sizes, platform, input_axes)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _quantized(
    x: jax.Array, kernels: QuantizedKernel, sizes: jax.Array, platform: str, input_axes: tuple[str, ...]
) -> jax.Array:
    """`grouped_linear` of quantized kernels [groups, *out, in]. Its gradient goes to x alone."""
    group = jnp.clip(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right"), max=len(sizes) - 1)
    rows, step = x, None
    if kernels.input_order is not None:
        rows = jnp.take_along_axis(rows, kernels.input_order[group], axis=-1)
    if kernels.format.activation is not None:
        static = None if kernels.input_scale is None else kernels.input_scale[group][:, None]
        rows, step = quantize_activations(rows, kernels.format.activation, static, input_axes)
        if platform == "cpu":
            rows = rows.astype(jnp.float32)  # the dtype of sums, which are scaled before they are rounded
        elif not (platform.startswith("tpu") and _of_integers(kernels.format)):
            rows = rows.astype(x.dtype)
    if platform.startswith("tpu"):
        from ttpu_jax.ops import grouped_quantized_tpu

        sums = grouped_quantized_tpu.product(rows, kernels, sizes, step is not None, interpret=platform != "tpu")
    elif platform == "cpu":
        how, inner = Product(jnp.dtype(jnp.float32)), prod(kernels.shape[1:-1])
        plain = replace(kernels, format=replace(kernels.format, activation=None), input_order=None, input_scale=None)
        sums = _cpu_product(rows, plain, sizes, inner, lambda rows, kernel: xla.product(rows, kernel, None, how))
    else:
        stored = dense(replace(kernels, input_order=None), x.dtype)
        sums = _ragged_dot(rows, _merged(stored), sizes, contract=2)
    return sums if step is None else (sums.astype(jnp.float32) * step).astype(x.dtype)


def _of_integers(form: KernelFormat) -> bool:
    """Whether a TPU multiplies values by rounded activations as integers."""
    integers = form.activation is not None and form.activation.dtype == "int8" and form.dtype.startswith("int")
    return integers and bool(block_table(device_kind(AttentionContext(mesh=None)))["digit_rows"])


def _quantized_with_residuals(
    x: jax.Array, kernels: QuantizedKernel, sizes: jax.Array, platform: str, input_axes: tuple[str, ...]
) -> tuple[jax.Array, tuple[jax.Array, QuantizedKernel, jax.Array]]:
    return _quantized(x, kernels, sizes, platform, input_axes), (x[:0], kernels, sizes)


def _quantized_gradients(
    platform: str,
    input_axes: tuple[str, ...],
    residuals: tuple[jax.Array, QuantizedKernel, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, None, None]:
    x, kernels, sizes = residuals
    return _gradient_to_x(gradient, dense(kernels, x.dtype), sizes, platform), None, None


_quantized.defvjp(_quantized_with_residuals, _quantized_gradients)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _dense(
    x: jax.Array, kernels: jax.Array, group_sizes: jax.Array, sums: jax.Array | None, platform: str
) -> jax.Array:
    """`grouped_linear` of kernels [groups, *out, in] in x's dtype, whose gradient begins with `sums`, if any."""
    if platform.startswith("tpu"):
        from ttpu_jax.ops import grouped_tpu  # Pallas takes 0.4 s to import

        return grouped_tpu.product(x, kernels, group_sizes, contract=1, interpret=platform != "tpu")
    if platform == "cpu":
        return _cpu_product(x, kernels, group_sizes, prod(kernels.shape[1:-1]), partial(_cpu_dot, contract=1))
    return _ragged_dot(x, _merged(kernels), group_sizes, contract=2)


_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def _with_residuals(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, sums: jax.Array | None, platform: str
) -> tuple[jax.Array, _Residuals]:
    return _dense(x, kernels, sizes, sums, platform), (x, kernels, sizes, sums)


def _gradients(
    platform: str, residuals: _Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    x, kernels, sizes, sums = residuals
    to_x = _gradient_to_x(gradient, kernels, sizes, platform)
    if platform.startswith("tpu"):
        from ttpu_jax.ops.grouped_gradient_tpu import kernel_gradient

        to_kernels, sums = kernel_gradient(x, gradient, sizes, kernels, sums, interpret=platform != "tpu"), None
    elif platform == "cpu":
        to_kernels = _cpu_kernel_gradient(x, gradient, sizes)
    else:
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        to_kernels = jax.lax.ragged_dot_general(gradient, x, sizes, numbers, preferred_element_type=jnp.float32)
    to_kernels = to_kernels.reshape(kernels.shape)
    if sums is not None:
        to_kernels = to_kernels + sums.astype(to_kernels.dtype)
    return to_x, to_kernels.astype(kernels.dtype), None, None


_dense.defvjp(_with_residuals, _gradients)


def _gradient_to_x(gradient: jax.Array, kernels: jax.Array, sizes: jax.Array, platform: str) -> jax.Array:
    """Each row of gradient [rows, out] times its group's kernel: [rows, in]."""
    if platform.startswith("tpu"):
        from ttpu_jax.ops import grouped_tpu

        return grouped_tpu.product(gradient, kernels, sizes, contract=0, interpret=platform != "tpu")
    if platform == "cpu":
        return _cpu_product(gradient, kernels, sizes, kernels.shape[-1], partial(_cpu_dot, contract=0))
    return _ragged_dot(gradient, _merged(kernels), sizes, contract=1)


def _merged(kernels: jax.Array) -> jax.Array:
    """[groups, *out, in] → [groups, out, in]."""
    return kernels.reshape(len(kernels), -1, kernels.shape[-1])


def _ragged_dot(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, contract: int) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), (0,), (0,))
    product = jax.lax.ragged_dot_general(x, kernels, sizes, numbers, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


# CPU


def _cpu_product(
    x: jax.Array,
    kernels: Kernel,
    sizes: jax.Array,
    features: int,
    product: Callable[[jax.Array, Any], jax.Array],
) -> jax.Array:
    """`product` of each row of x with its group's kernel: [rows, features] in x's dtype."""
    size = _cpu_block(len(x), len(sizes))
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def visit(group: jax.Array, start: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, start, size)
        # XLA:CPU slices bfloat16 as float32, and without the barrier would convert all kernels for it before the loop.
        held, group = jax.lax.optimization_barrier((kernels, group))
        kernel = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False), held)
        added = product(rows, kernel).astype(out.dtype).reshape(size, features)
        # What is written after the group's last row is the next group's, which comes later and writes its own.
        return jax.lax.dynamic_update_slice_in_dim(out, added, start, 0)

    return _cpu_visits(visit, jnp.zeros((len(padded), features), x.dtype), sizes, size)[: len(x)]


def _cpu_dot(rows: jax.Array, kernel: jax.Array, *, contract: int) -> jax.Array:
    """rows times kernel [*out, in], whose outputs (0) or inputs (1) are contracted."""
    kernel = kernel.reshape(-1, kernel.shape[-1])
    # XLA:CPU is fast in bfloat16 only where both operands contract their minor dimension, see `ops.linear`.
    if contract == 0:
        rows, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    return jax.lax.dot_general(rows, kernel, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)


def _cpu_kernel_gradient(x: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sum of gradient [rows, out] times x [rows, in] over each group's rows: float32 [groups, out, in]."""
    size = _cpu_block(len(x), len(sizes))
    padded_x, padded_gradient = (jnp.pad(rows, ((0, size), (0, 0))) for rows in (x, gradient))
    ends = jnp.cumsum(sizes)

    def visit(group: jax.Array, start: jax.Array, total: jax.Array) -> jax.Array:
        mine = (start + jnp.arange(size) < ends[group])[:, None]
        rows, gradients = (
            jnp.where(mine, jax.lax.dynamic_slice_in_dim(padded, start, size), 0).astype(jnp.float32)
            for padded in (padded_x, padded_gradient)
        )
        added = jax.lax.dynamic_index_in_dim(total, group, keepdims=False) + gradients.T @ rows
        return jax.lax.dynamic_update_index_in_dim(total, added, group, 0)

    return _cpu_visits(visit, jnp.zeros((len(sizes), gradient.shape[1], x.shape[1])), sizes, size)


def _cpu_block(rows: int, groups: int) -> int:
    """Rows of a block: about those of a group, so that few are computed in vain; at least 8, which cost as one does."""
    return min(64, max(8, 1 << (rows // groups).bit_length()))


def _cpu_visits(
    visit: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], value: jax.Array, sizes: jax.Array, block: int
) -> jax.Array:
    """`visit(group, first row, value)` for every block of rows of every group, in order."""
    counts = -(-sizes // block)
    last, first_rows = jnp.cumsum(counts), jnp.cumsum(sizes) - sizes

    def body(index: jax.Array, value: jax.Array) -> jax.Array:
        group = (last <= index).sum()
        start = first_rows[group] + (index - last[group] + counts[group]) * block
        return visit(group, start, value)

    return jax.lax.fori_loop(0, last[-1], body, value)
