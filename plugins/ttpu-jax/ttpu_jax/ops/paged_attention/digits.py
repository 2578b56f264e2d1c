"""Products with int8 inside kernels: the other rows become integers of two int8 digits, so that int8 is multiplied as
it is, without being converted."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ttpu_jax.ops.paged_attention.kernel import LANES

WITHOUT_INTEGERS = ("TPU v4", "TPU7x")
"""Kinds of devices that multiply no int8: kernels of the first do not, and the second has no integers."""
DIGIT = 128
"""An integer of at most 127 * 128 is 128 * high + low, both in int8."""


class Rows:
    """Rows [rows, n] to be multiplied by int8. Each is an integer of two int8 digits times a step, off by at most
    1/32512 of the row's largest number.

    Args:
        x: float32 [rows, n].
        largest: [rows or 1, 1], in place of each row's largest number; then x is at least 0.
    """

    def __init__(self, x: jax.Array, largest: jax.Array | None = None) -> None:
        positive, largest = largest is not None, jnp.abs(x).max(1, keepdims=True) if largest is None else largest
        self.step = jnp.where(largest == 0, 1.0, largest / (127 * DIGIT))
        steps = x * (1 / self.step) + 0.5
        whole = (steps if positive else jnp.floor(steps)).astype(jnp.int32)  # a conversion cuts the fraction off
        high = (whole + DIGIT // 2) >> 7
        self.digits = jnp.concatenate([high, whole - (high << 7)]).astype(jnp.int8)

    def by_features(self, keys: Sequence[jax.Array]) -> jax.Array:
        """The products with rows of keys, whose features are split into parts of 128: [rows, keys]."""
        parts = [_product(self.digits[:, n * LANES : (n + 1) * LANES], each, 1) for n, each in enumerate(keys)]
        high, low = self._digits(sum(parts[1:], parts[0]))
        return ((high << 7) + low).astype(jnp.float32) * self.step  # of at most 1,024 features: fits an int32

    def by_rows(self, values: Sequence[jax.Array]) -> jax.Array:
        """The sums of rows of values, whose features are split into parts of 128: [rows, features]."""
        parts = [self._digits(_product(self.digits, each, 0)) for each in values]
        sums = [DIGIT * high.astype(jnp.float32) + low.astype(jnp.float32) for high, low in parts]
        return jnp.concatenate(sums, axis=1) * self.step

    def _digits(self, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = len(sums) // 2
        return sums[:rows], sums[rows:]


def _product(x: jax.Array, other: jax.Array, over: int) -> jax.Array:
    return jax.lax.dot_general(x, other, (((1,), (over,)), ((), ())), preferred_element_type=jnp.int32)
