"""cos and sin of the same angles, which a TPU computes together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

QUARTER_TURNS = tuple(
    np.float32(part) for part in (0.636474609375, 1.4513731002807617e-04, 2.567685442045331e-08, 5.6988463427443126e-12)
)
"""2 / pi as a sum: three numbers of 12 significant bits, and the rest."""


def cos_and_sin(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of float32 angles in radians, of any shape.

    XLA computes either for any float32, with its own reduction to a quarter turn. On TPUs both share one reduction
    here, which takes half as long. Its results differ from the exact ones by at most 2e-7 for angles up to 2**24;
    beyond, they are wrong.
    """
    return jax.lax.platform_dependent(angles, tpu=_cos_and_sin, default=lambda x: (jnp.cos(x), jnp.sin(x)))


def _cos_and_sin(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One reduction by quarter turns (Cody and Waite, Software Manual for the Elementary Functions, 1980, in which
    products of 12 bits by 12 bits are exact), and the polynomials of Cephes' sinf and cosf on [-pi/4, pi/4]."""
    high, low = _two_halves(angles)
    quarters, rest = _without_quarters(0, high * QUARTER_TURNS[0])
    for exact in (high * QUARTER_TURNS[1], low * QUARTER_TURNS[0]):
        more, part_of_one = _without_quarters(0, exact)
        quarters, rest = _without_quarters(quarters + more, rest + part_of_one)
    small = high * QUARTER_TURNS[2] + (low * QUARTER_TURNS[1] + (high * QUARTER_TURNS[3] + low * QUARTER_TURNS[2]))
    quarters, rest = _without_quarters(quarters, rest + small)
    x = rest * np.float32(np.pi / 2)
    square = x * x
    sin = x + x * square * _polynomial(square, -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
    cos = 1 - 0.5 * square + square * square * _polynomial(square, 4.166664568e-2, -1.388731625e-3, 2.443315712e-5)
    number = quarters.astype(jnp.int32)
    odd = (number & 1) == 1
    return _negated(jnp.where(odd, sin, cos), number + 1), _negated(jnp.where(odd, cos, sin), number)


def _two_halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 numbers of 12 significant bits each, whose sum is x."""
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & -(1 << 12), jnp.float32)
    return high, x - high


def _without_quarters(quarters: jax.Array | int, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A number of quarter turns, whole ones and others: the same, of which the others are at most one half."""
    more = jnp.round(rest)
    return quarters + more, rest - more


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    """coefficients[0] + coefficients[1] x + ..., by Horner's rule."""
    result = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = coefficient + x * result
    return result


def _negated(x: jax.Array, quarters: jax.Array) -> jax.Array:
    """-x where `quarters` modulo 4 is 2 or 3, and x elsewhere."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) ^ ((quarters & 2) << 30)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
