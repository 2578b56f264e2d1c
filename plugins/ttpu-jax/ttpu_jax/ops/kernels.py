"""The types that a kernel in the parameter tree may have: a dense array, a kernel with low-rank adapters, or a
quantized kernel. Each is a pytree that jit, scan and shard_map accept like an array; `ttpu_jax.ops.linear` and
`ttpu_jax.ops.grouped` multiply by any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axes = tuple[Any, ...]
LARGEST_INT8 = 127
"""Symmetric: -128 is not used, so that a kernel and its negative have the same scales."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """`values` times `scale`, with one scale per output channel.

    values: int8 [*out, in]; with a leading axis where layers are stacked or there are several experts.
    scale: float32 [*out].
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*out, in]."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored values."""
        return np.dtype(self.values.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel:
    """A kernel with room for several LoRA adapters.

    base: the kernel that they change, [*out, in].
    a: [adapters, rank, in]; adapter 1 is the first of them.
    b: [*out, adapters, rank].
    adapters: int32 [tokens], the adapter of each token, 0 for none; None outside an engine's step, where the base is
        used alone (`with_adapters` sets it).
    """

    base: Any
    a: jax.Array
    b: jax.Array
    adapters: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base kernel, [*out, in]."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the base kernel."""
        return np.dtype(self.base.dtype)


Kernel = jax.Array | QuantizedKernel | LowRankKernel


def quantize(kernel: jax.Array) -> QuantizedKernel:
    """Quantize a dense kernel [..., in] to int8, with one scale per output channel from its largest weight; the error
    of a weight is at most half the scale."""
    weights = kernel.astype(jnp.float32)
    largest = jnp.abs(weights).max(axis=-1)
    scale = jnp.where(largest > 0, largest / LARGEST_INT8, 1.0)
    values = jnp.clip(jnp.round(weights / scale[..., None]), -LARGEST_INT8, LARGEST_INT8)
    return QuantizedKernel(values.astype(jnp.int8), scale)


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
    return (kernel.values.astype(jnp.float32) * kernel.scale[..., None]).astype(dtype or jnp.float32)


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
    return QuantizedKernel(make(kernel.values, axes), make(kernel.scale, axes[:-1]))


@map_arrays.register
def _(kernel: LowRankKernel, axes: Axes, make: Callable[[Any, Axes], Any]) -> Any:
    a, b = make(kernel.a, (None, None, axes[-1])), make(kernel.b, (*axes[:-1], None, None))
    return replace(kernel, base=map_arrays(kernel.base, axes, make), a=a, b=b)


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
