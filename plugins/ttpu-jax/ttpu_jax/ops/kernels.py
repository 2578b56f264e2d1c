"""The types that a kernel in the parameter tree may have: a dense array, a kernel with low-rank adapters (several that
are served, or one that is trained), or a quantized kernel. Each is a pytree that jit, scan and shard_map accept like an
array; `ttpu_jax.ops.linear` and `ttpu_jax.ops.grouped` multiply by any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec.kernel_format import LARGEST, KernelFormat, PartName

Axes = tuple[Any, ...]
INT8 = KernelFormat("int8")
"""One scale per output channel, without zero points."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [*lead, *out, in] in low precision: scale * (value - zero point). `lead` are stacked layers and experts.

    values: [*lead, *out, in] in the format's dtype, or in a wider one that holds the same numbers; int4 where the
        format's is a 4-bit float: its codes, because a TPU reinterprets bits by a pass over the kernel.
    scale: [*lead, *out], or [*lead, *out, groups] if groups of neighbouring inputs have scales of their own.
    zero_point: int8 in the shape of the scale, or None.
    input_order: int32 [*lead, in], the input feature of each column of the values; None where they are in order.
    input_scale: float32 [*lead], the static scale of the activations, or None.
    format: what the numbers mean. Static.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    input_order: jax.Array | None = None
    input_scale: jax.Array | None = None
    format: KernelFormat = field(default=INT8, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*lead, *out, in]."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the kernel."""
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored values."""
        return np.dtype(self.values.dtype)

    @property
    def coded(self) -> bool:
        """Whether the values are the codes of 4-bit floats."""
        return self.format.dtype == "float4_e2m1fn" and self.values.dtype == jnp.int4

    @property
    def numbers(self) -> jax.Array:
        """The values as numbers, [*lead, *out, in]."""
        return jax.lax.bitcast_convert_type(self.values, jnp.float4_e2m1fn) if self.coded else self.values

    @property
    def parts(self) -> dict[PartName, jax.Array]:
        """The arrays of the kernel by their names, see `ttpu_core.spec.kernel_format.parts_of`."""
        found = {name: getattr(self, name) for name in get_args(PartName)}
        return {name: array for name, array in found.items() if array is not None}


def kernel_from_parts(form: KernelFormat, parts: Mapping[PartName, Any]) -> QuantizedKernel:
    """The kernel of a format whose arrays are `parts`; the inverse of `QuantizedKernel.parts`."""
    return QuantizedKernel(**{str(name): array for name, array in parts.items()}, format=form)


@dataclass(frozen=True)
class KernelOver:
    """A kernel that adds something to another one, its base [*out, in], whose shape and dtype it has."""

    base: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base kernel, [*out, in]."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the base kernel."""
        return np.dtype(self.base.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel(KernelOver):
    """A kernel with room for several LoRA adapters.

    base: the kernel that they change, [*out, in].
    a: [adapters, rank, in]; adapter 1 is the first of them.
    b: [*out, adapters, rank].
    adapters: int32 [tokens], the adapter of each token, 0 for none; None outside an engine's step, where the base is
        used alone (`with_adapters` sets it).
    """

    a: jax.Array
    b: jax.Array
    adapters: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedKernel(KernelOver):
    """A kernel with one low-rank adapter for all tokens, in a block for each checkpoint module that is fused in it.

    base: the kernel that it changes, [*lead, *out, in].
    a: [*lead, blocks, rank, in].
    b: [*lead, *out, blocks * rank], zero where an output is another block's.
    magnitude: float32 [*lead, *out], DoRA's (arXiv 2402.09353), 0 for outputs without; None for plain LoRA.
    key: uint32 [*lead, 2], of the inputs that are dropped; None drops none.
    scaling: what b @ a is multiplied by. Static.
    dropout: the share of inputs that is dropped, apart for each block. Static.
    """

    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None
    key: jax.Array | None = None
    scaling: float = field(default=1.0, metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})


Kernel = jax.Array | QuantizedKernel | LowRankKernel | AdaptedKernel


def quantize(kernel: jax.Array, form: KernelFormat = INT8) -> QuantizedKernel:
    """Round a dense kernel [*out, in] to the nearest numbers of a format, as `ttpu_core.quantization.rounding` does.

    The scale of a channel or group makes its largest weight the largest number of the dtype; with zero points, it makes
    the range from its smallest weight (or 0) to its largest (or 0) the range of the dtype. Scales are rounded to their
    dtype before weights are divided by them. A channel or group of zeros has the scale 1.

    Raises:
        RequestError: the group size does not divide the inputs.
        ValueError: the format has an input order or a static scale of the activations, which need calibration.
    """
    if form.input_order or (form.activation is not None and form.activation.static):
        raise ValueError("a kernel cannot be rounded to a format whose input order or input scale is calibrated")
    groups, inputs = form.groups(kernel.shape[-1]), kernel.shape[-1]
    weights = kernel.astype(jnp.float32).reshape(*kernel.shape[:-1], groups, inputs // groups)
    zero = None
    if form.symmetric:
        scale = _scale(jnp.abs(weights).max(-1), LARGEST[form.dtype], form.scale_dtype)
        quotients = jnp.clip(_divided(weights, scale[..., None]), -LARGEST[form.dtype], LARGEST[form.dtype])
    else:
        low, high = jnp.iinfo(form.dtype).min, jnp.iinfo(form.dtype).max
        smallest = jnp.minimum(weights.min(-1), 0)
        scale = _scale(jnp.maximum(weights.max(-1), 0) - smallest, high - low, form.scale_dtype)
        zero = jnp.clip(jnp.round(low - _divided(smallest, scale)), low, high)
        quotients = jnp.clip(jnp.round(_divided(weights, scale[..., None])) + zero[..., None], low, high)
    values = _rounded(quotients, form.dtype).reshape(kernel.shape)
    if form.group_size is None:
        scale, zero = scale[..., 0], None if zero is None else zero[..., 0]
    zero_point = None if zero is None else zero.astype(jnp.int8)
    return QuantizedKernel(values, scale.astype(form.scale_dtype), zero_point, format=form)


def _scale(span: jax.Array, steps: float, dtype: str) -> jax.Array:
    """span / steps as the dtype holds it, in float32; 1 where that is 0. Powers of two are rounded up, so that no
    weight is beyond the largest number."""
    scale = _divided(span, jnp.float32(steps))
    if dtype == "float8_e8m0fnu":
        fraction, exponent = jnp.frexp(scale)
        held = jnp.ldexp(jnp.float32(1), jnp.clip(jnp.where(fraction == 0.5, exponent - 1, exponent), -126, 127))
    else:
        held = scale.astype(dtype).astype(jnp.float32)
    return jnp.where((scale > 0) & (held > 0), held, 1.0)


def _divided(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, rounded correctly: XLA multiplies by the reciprocal of a divisor that it knows to be a broadcast."""
    return a / (b + a * 0)


def _rounded(x: jax.Array, dtype: str) -> jax.Array:
    """float32, within the range of the dtype, to its nearest number, the even one of two."""
    if dtype.startswith("int"):
        x = jnp.round(x)
    elif dtype == "float4_e2m1fn":  # XLA:CPU converts by way of another dtype, and so rounds twice
        step = jnp.where(jnp.abs(x) < 2, 0.5, jnp.where(jnp.abs(x) < 4, 1.0, 2.0))
        x = jnp.round(x / step) * step
    return x.astype(dtype)


def base_of(kernel: Any) -> Any:
    """The kernel without its adapters."""
    return kernel.base if isinstance(kernel, LowRankKernel) else kernel


def with_base(kernel: Any, base: Any) -> Any:
    """`base` with the adapters of `kernel`, if it has any."""
    return replace(kernel, base=base) if isinstance(kernel, LowRankKernel) else base


@singledispatch
def dense(kernel: Any, dtype: Any = None) -> jax.Array:
    """The kernel as one array [*out, in] in `dtype`, by default the array's own, float32 for a quantized one. For
    products that contract another dimension than the last."""
    array: jax.Array = kernel if dtype is None else kernel.astype(dtype)
    return array


@dense.register
def _(kernel: QuantizedKernel, dtype: Any = None) -> jax.Array:
    weights = grouped_values(kernel, jnp.float32) * kernel.scale.astype(jnp.float32).reshape(*_by_group(kernel), 1)
    weights = weights.astype(dtype or jnp.float32).reshape(kernel.shape)
    if kernel.input_order is None:
        return weights
    *lead, inputs = kernel.input_order.shape
    place = jnp.argsort(kernel.input_order, axis=-1).reshape(*lead, *(1,) * (kernel.ndim - len(lead) - 1), inputs)
    return jnp.take_along_axis(weights, place, axis=-1)


@singledispatch
def rows_of(table: Any, index: jax.Array, dtype: Any = None) -> jax.Array:
    """Return rows of a table [rows, in]: [*index, in] in `dtype`, by default the array's own; float32 for a quantized
    one. `index` has any shape; indices beyond the table's ends are moved to them."""
    taken: jax.Array = jnp.take(table, index, axis=0, mode="clip")
    return taken if dtype is None else taken.astype(dtype)


@rows_of.register
def _(table: QuantizedKernel, index: jax.Array, dtype: Any = None) -> jax.Array:
    values, scale = (jnp.take(part, index, axis=0, mode="clip") for part in (table.values, table.scale))
    zero = None if table.zero_point is None else jnp.take(table.zero_point, index, axis=0, mode="clip")
    return dense(QuantizedKernel(values, scale, zero, format=table.format), dtype)


def grouped_values(kernel: QuantizedKernel, dtype: Any) -> jax.Array:
    """The values less their zero points, [*out, groups, inputs of a group], in a floating-point dtype, which holds them
    exactly if it has at least 8 bits of mantissa (differences of int8 have magnitudes up to 255). One group where a
    channel has one scale."""
    by_group = _by_group(kernel)
    values = kernel.numbers.reshape(*by_group, -1).astype(dtype)
    if kernel.zero_point is not None:
        values = values - kernel.zero_point.reshape(*by_group, 1).astype(dtype)
    return values


def _by_group(kernel: QuantizedKernel) -> tuple[int, ...]:
    """[*out, groups], with one group where a channel has one scale."""
    return kernel.scale.shape if kernel.format.group_size is not None else (*kernel.scale.shape, 1)


@singledispatch
def map_arrays(kernel: Any, axes: Axes, make: Callable[[Any, Axes], Any]) -> Any:
    """Return the kernel with each of its arrays replaced by `make(array, axes of the array)`, for shardings.

    Args:
        kernel: [*out, in], or anything with its structure.
        axes: of the kernel, one per dimension: logical axes, or mesh axes.
        make: what stands in an array's place.
    """
    return make(kernel, axes)


@map_arrays.register
def _(kernel: QuantizedKernel, axes: Axes, make: Callable[[Any, Axes], Any]) -> Any:
    of_scale = axes if kernel.format.group_size is not None else axes[:-1]
    order, of_inputs = kernel.input_order, kernel.input_scale
    return QuantizedKernel(
        make(kernel.values, axes),
        make(kernel.scale, of_scale),
        None if kernel.zero_point is None else make(kernel.zero_point, of_scale),
        None if order is None else make(order, (*axes[: order.ndim - 1], None)),
        None if of_inputs is None else make(of_inputs, axes[: of_inputs.ndim]),
        format=kernel.format,
    )


@map_arrays.register
def _(kernel: LowRankKernel, axes: Axes, make: Callable[[Any, Axes], Any]) -> Any:
    a, b = make(kernel.a, (None, None, axes[-1])), make(kernel.b, (*axes[:-1], None, None))
    return replace(kernel, base=map_arrays(kernel.base, axes, make), a=a, b=b)


@map_arrays.register
def _(kernel: AdaptedKernel, axes: Axes, make: Callable[[Any, Axes], Any]) -> Any:
    base, lead = map_arrays(kernel.base, axes, make), axes[: len(kernel.a.shape) - 3]
    a, b = make(kernel.a, (*lead, None, None, axes[-1])), make(kernel.b, (*axes[:-1], None))
    magnitude = None if kernel.magnitude is None else make(kernel.magnitude, axes[:-1])
    key = None if kernel.key is None else make(kernel.key, (*lead, None))
    return replace(kernel, base=base, a=a, b=b, magnitude=magnitude, key=key)


def with_adapters(tree: Any, adapters: jax.Array | None) -> Any:
    """Return the tree with every adapted kernel bound to the adapters of the step's tokens.

    Args:
        tree: kernels and other arrays.
        adapters: int32 [tokens], 0 for none; None leaves all as it is.
    """
    if adapters is None:
        return tree

    def bind(leaf: Any) -> Any:
        return replace(leaf, adapters=adapters) if isinstance(leaf, LowRankKernel) else leaf

    return jax.tree.map(bind, tree, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))
