"""Float32 weights that a training step rounds where they are used, so that no rounded copy of all weights exists, and
devices that share a weight exchange it rounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_jax.ops.kernels import dense, rows_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Master:
    """A master weight in the place of the weight that a model computes with.

    value: float32 [*shape], or [layers, *shape].
    slot: zeros in the shape of `value` and the rounded dtype. Gradients with respect to it are those of the rounded
        weight; the value then has none. None: gradients are the value's.
    dtype: that it is rounded to. Static.
    sharding: of one layer's weight, and of its gradient. Static; None leaves both to the compiler.
    apart: whether the module that multiplies by it rounds it itself, by `each`. Static.
    of_experts: whether it is the kernels of a layer's experts. Static.
    """

    value: jax.Array
    slot: jax.Array | None
    dtype: np.dtype[Any] = field(metadata={"static": True})
    sharding: NamedSharding | None = field(default=None, metadata={"static": True})
    apart: bool = field(default=False, metadata={"static": True})
    of_experts: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the weight."""
        return self.value.ndim

    def rounded(self) -> jax.Array:
        """The weight as a model computes with it, [*shape] in `dtype`."""
        if self.slot is None:
            return self._placed(self.value.astype(self.dtype))
        return self._placed(_rounded(self.value, self.slot, self.of_experts))

    def each(self) -> tuple[jax.Array, ...]:
        """The weights along the first dimension as a model computes with them, none of which is copied out of a larger
        one."""
        inner = self.sharding and NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[1:]))
        slots = (None,) * len(self.value) if self.slot is None else self.slot
        return tuple(
            Master(value, slot, self.dtype, inner).rounded() for value, slot in zip(self.value, slots, strict=True)
        )

    def _placed(self, weight: jax.Array) -> jax.Array:
        return weight if self.sharding is None else jax.lax.with_sharding_constraint(weight, self.sharding)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded(value: jax.Array, slot: jax.Array, of_experts: bool) -> jax.Array:
    one = jax.lax.optimization_barrier(jnp.ones((), value.dtype))
    weight = (value * one).astype(slot.dtype)
    # XLA would gather experts before it drops the loop's dimension of layers, and for that copy the float32 weights of
    # all layers to an order of dimensions that begins with the experts.
    return jax.lax.optimization_barrier(weight) if of_experts else weight


def _forward(value: jax.Array, slot: jax.Array, of_experts: bool) -> tuple[jax.Array, None]:
    return _rounded(value, slot, of_experts), None


def _backward(of_experts: bool, _: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, gradient


_rounded.defvjp(_forward, _backward)


def rounded(tree: Any) -> Any:
    """The tree with each master weight rounded, but for those that modules round themselves."""

    def one(leaf: Any) -> Any:
        return leaf.rounded() if isinstance(leaf, Master) and not leaf.apart else leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Master))


@dense.register
def _(kernel: Master, dtype: Any = None) -> jax.Array:
    return kernel.rounded().astype(dtype or kernel.dtype)


@rows_of.register
def _(table: Master, index: jax.Array, dtype: Any = None) -> jax.Array:
    """Rows are looked up in float32, and their gradients added up in it."""
    taken: jax.Array = jnp.take(table.value, index, axis=0, mode="clip")
    return taken.astype(dtype or table.dtype)
