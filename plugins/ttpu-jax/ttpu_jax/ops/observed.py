"""A kernel that observes the inputs of its products. The observation is the gradient of a gauge: a tree of zeros beside
the kernel, whose cotangent is defined as the statistics of the inputs, whatever the cotangent of the product is. So it
comes out of jit, scan and shard_map as gradients do, summed over batches and devices, and the compiler removes the
rest of the backward pass, on which it does not depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ttpu_jax.ops import grouped, kernels, linear


class Gauge(NamedTuple):
    """Statistics of inputs, see `ttpu_core.calibration.InputStatistics`; `tokens` is float32 too."""

    tokens: jax.Array
    products: jax.Array
    magnitude: jax.Array
    largest: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ObservedKernel(kernels.KernelOver):
    """A dense kernel and its gauge.

    base: [*out, in], or [experts, *out, in].
    gauge: of the inputs, with a leading axis for experts.
    """

    gauge: Gauge


def empty_gauge(inputs: int, experts: int | None = None) -> Gauge:
    """A gauge of zeros for a kernel with so many inputs."""
    lead = () if experts is None else (experts,)
    shapes = (lead, (*lead, inputs, inputs), (*lead, inputs), (*lead, inputs))
    return Gauge(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def added(total: Gauge, found: Gauge) -> Gauge:
    """The statistics of two sets of tokens together."""
    return Gauge(
        total.tokens + found.tokens,
        total.products + found.products,
        total.magnitude + found.magnitude,
        jnp.maximum(total.largest, found.largest),
    )


@jax.custom_vjp
def _observe(x: jax.Array, gauge: Gauge) -> jax.Array:
    """x [..., in], whose statistics become the gradient of the gauge."""
    return x


def _of_rows(rows: jax.Array) -> Gauge:
    wide = rows.astype(jnp.float32)
    magnitudes = jnp.abs(wide)
    return Gauge(
        jnp.float32(len(wide)),
        jnp.matmul(wide.T, wide, precision="highest"),
        magnitudes.sum(0),
        magnitudes.max(0),
    )


_observe.defvjp(
    lambda x, gauge: (x, x),
    lambda x, gradient: (gradient, _of_rows(x.reshape(-1, x.shape[-1]))),
)


@jax.custom_vjp
def _observe_grouped(x: jax.Array, gauge: Gauge, sizes: jax.Array) -> jax.Array:
    """x [rows, in], sorted by group, the statistics of whose groups become the gradient of the gauge."""
    return x


def _of_groups(x: jax.Array, sizes: jax.Array) -> Gauge:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    own = (group < len(sizes))[:, None]
    wide = jnp.where(own, x.astype(jnp.float32), 0.0)  # rows after the last group are undefined
    magnitudes = jnp.abs(wide)
    largest = jax.ops.segment_max(magnitudes, group, len(sizes), indices_are_sorted=True)

    def products(index: jax.Array) -> jax.Array:
        mine = jnp.where((group == index)[:, None], wide, 0.0)
        return jnp.matmul(mine.T, mine, precision="highest")

    return Gauge(
        sizes.astype(jnp.float32),
        jax.lax.map(products, jnp.arange(len(sizes))),
        jax.ops.segment_sum(magnitudes, group, len(sizes), indices_are_sorted=True),
        jnp.maximum(largest, 0.0),
    )


_observe_grouped.defvjp(
    lambda x, gauge, sizes: (x, (x, sizes)),
    lambda residuals, gradient: (gradient, _of_groups(*residuals), None),
)


@linear._linear.register
def _(kernel: ObservedKernel, x: jax.Array, bias: jax.Array | None, how: Any) -> jax.Array:
    return linear._linear(kernel.base, _observe(x, kernel.gauge), bias, how)


@grouped._grouped.register
def _(
    kernel: ObservedKernel, x: jax.Array, sizes: jax.Array, platform: str, input_axes: tuple[str, ...] = ()
) -> jax.Array:
    return grouped._grouped(kernel.base, _observe_grouped(x, kernel.gauge, sizes), sizes, platform, input_axes)


@kernels.dense.register
def _(kernel: ObservedKernel, dtype: Any = None) -> jax.Array:
    return kernels.dense(kernel.base, dtype)


@kernels.map_arrays.register
def _(kernel: ObservedKernel, axes: kernels.Axes, make: Callable[[Any, kernels.Axes], Any]) -> Any:
    """A grouped kernel's gauge is sharded by experts; the inputs of an expert must be whole."""
    lead = axes[:1] if kernel.gauge.tokens.ndim else ()
    rest = ((), (None, None), (None,), (None,))
    gauge = Gauge(*(make(array, (*lead, *each)) for array, each in zip(kernel.gauge, rest, strict=True)))
    return ObservedKernel(kernels.map_arrays(kernel.base, axes, make), gauge)
