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
"""Digits are from -64 to 63, and the first one at most 127."""


class Rows:
    """Rows [rows, n] to be multiplied by int8. Each number is an integer of so many int8 digits times the row's step:
    of two digits off by at most 1/32512 of the row's largest number, of three by 1/4161536.

    Args:
        x: float32 [rows, n].
        count: of digits, two or three.
        largest: [rows, 1], at least each row's largest number, where that is known; then x is at least 0.
    """

    def __init__(self, x: jax.Array, count: int, largest: jax.Array | None = None) -> None:
        positive, largest = largest is not None, jnp.abs(x).max(1, keepdims=True) if largest is None else largest
        step = largest / (127 * DIGIT ** (count - 1))
        self.step = jnp.where(largest == 0, 1.0, step)  # a conversion of NaN is not defined
        steps = x * (1 / self.step) + 0.5
        left = (steps if positive else jnp.floor(steps)).astype(jnp.int32)  # a conversion cuts the fraction off
        digits = []
        for _ in range(count - 1):
            more = (left + DIGIT // 2) >> 7
            digits.append(left - (more << 7))
            left = more
        self.count, self.digits = count, jnp.concatenate([left, *reversed(digits)]).astype(jnp.int8)

    def by_features(self, keys: Sequence[jax.Array]) -> jax.Array:
        """The products with rows of keys, whose features are split into parts of 128: [rows, keys]."""
        parts = [_product(self.digits[:, n * LANES : (n + 1) * LANES], each, 1) for n, each in enumerate(keys)]
        return self._summed(sum(parts[1:], parts[0]))

    def by_rows(self, values: Sequence[jax.Array]) -> jax.Array:
        """The sums of rows of values, whose features are split into parts of 128: [rows, features]."""
        return jnp.concatenate([self._summed(_product(self.digits, each, 0)) for each in values], axis=1)

    def _summed(self, sums: jax.Array) -> jax.Array:
        """float32 [rows, n] of the digits' int32 sums [digits * rows, n]."""
        rows = len(sums) // self.count
        found = sums[:rows].astype(jnp.float32)
        for digit in range(1, self.count):
            found = DIGIT * found + sums[digit * rows : (digit + 1) * rows].astype(jnp.float32)
        return found * self.step


def _product(x: jax.Array, other: jax.Array, over: int) -> jax.Array:
    return jax.lax.dot_general(x, other, (((1,), (over,)), ((), ())), preferred_element_type=jnp.int32)
