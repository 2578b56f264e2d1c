"""ATen operations that compute each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_any.aten.table import OPERATIONS, Result, cast, operation

UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": jax.lax.erf,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "rsqrt": jax.lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
}
ARITHMETIC: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "atan2": jnp.arctan2,
    "fmod": jnp.fmod,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul": jnp.multiply,
    "remainder": jnp.remainder,
}
COMPARISONS: dict[str, Callable[[Any, Any], jax.Array]] = {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}
LOGIC: dict[str, Callable[..., jax.Array]] = {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
}
LOGICAL: dict[str, Callable[..., jax.Array]] = {
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}
TESTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
}


def _in_result_dtype(function: Any) -> Callable[..., jax.Array]:
    return lambda result, *values: function(*(cast(value, result.dtype) for value in values))


def _as_given(function: Any) -> Callable[..., jax.Array]:
    return lambda result, *values: function(*values)


OPERATIONS.update({name: _in_result_dtype(function) for name, function in {**UNARY, **ARITHMETIC, **LOGIC}.items()})
OPERATIONS.update({name: _as_given(function) for name, function in {**COMPARISONS, **LOGICAL, **TESTS}.items()})


@operation("add")
def add(result: Result, a: Any, b: Any, *, alpha: Any = 1) -> jax.Array:
    """a + alpha · b."""
    b = cast(b, result.dtype)
    return cast(a, result.dtype) + (b if alpha == 1 else b * cast(alpha, result.dtype))


@operation("sub")
def subtract(result: Result, a: Any, b: Any, *, alpha: Any = 1) -> jax.Array:
    """a − alpha · b."""
    b = cast(b, result.dtype)
    return cast(a, result.dtype) - (b if alpha == 1 else b * cast(alpha, result.dtype))


@operation("rsub")
def subtract_from(result: Result, a: Any, b: Any, alpha: Any = 1) -> jax.Array:
    """b − alpha · a."""
    return subtract(result, b, a, alpha=alpha)


@operation("div")
def divide(result: Result, a: Any, b: Any, *, rounding_mode: str | None = None) -> jax.Array:
    """a / b, rounded as torch's rounding mode says."""
    a, b = cast(a, result.dtype), cast(b, result.dtype)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        return jax.lax.div(*jnp.broadcast_arrays(a, b)) if jnp.issubdtype(a.dtype, jnp.integer) else jnp.trunc(a / b)
    return a / b


@operation("floor_divide")
def floor_divide(result: Result, a: Any, b: Any) -> jax.Array:
    """The largest whole number that is not above a / b."""
    return divide(result, a, b, rounding_mode="floor")


@operation("pow")
def power(result: Result, base: Any, exponent: Any) -> jax.Array:
    """base ** exponent."""
    base = cast(base, result.dtype)
    if isinstance(exponent, int | float):
        if exponent == int(exponent) and abs(exponent) <= 8:
            return jax.lax.integer_pow(base, int(exponent))
        if exponent in (0.5, -0.5):
            return jnp.sqrt(base) if exponent > 0 else jax.lax.rsqrt(base)
    return jnp.power(base, cast(exponent, result.dtype))


@operation("where")
def where(result: Result, condition: jax.Array, a: Any, b: Any) -> jax.Array:
    """a where the condition holds, else b."""
    return jnp.where(condition, cast(a, result.dtype), cast(b, result.dtype))


@operation("masked_fill")
def masked_fill(result: Result, x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    """x, with `value` where the mask holds."""
    return jnp.where(mask, cast(value, result.dtype), x)


@operation("clamp", "clamp_min")
def clamp(result: Result, x: Any, low: Any = None, high: Any = None, **limits: Any) -> jax.Array:
    """x, but no less than `low` and no more than `high`."""
    low, high = limits.get("min", low), limits.get("max", high)
    x = cast(x, result.dtype)
    x = x if low is None else jnp.maximum(x, cast(low, result.dtype))
    return x if high is None else jnp.minimum(x, cast(high, result.dtype))


@operation("clamp_max")
def clamp_max(result: Result, x: Any, high: Any) -> jax.Array:
    """x, but no more than `high`."""
    return jnp.minimum(cast(x, result.dtype), cast(high, result.dtype))


@operation("hardtanh")
def hardtanh(result: Result, x: Any, low: float = -1.0, high: float = 1.0) -> jax.Array:
    """x between `low` and `high`."""
    return clamp(result, x, low, high)


@operation("gelu")
def gelu(result: Result, x: jax.Array, approximate: str = "none") -> jax.Array:
    """The Gaussian error linear unit."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operation("leaky_relu")
def leaky_relu(result: Result, x: jax.Array, slope: float = 0.01) -> jax.Array:
    """x where it is positive, else slope · x."""
    return jax.nn.leaky_relu(x, slope)


@operation("elu")
def elu(result: Result, x: jax.Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> jax.Array:
    """The exponential linear unit."""
    negative = alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale)
    return (scale * jnp.where(x > 0, x, negative)).astype(result.dtype)


@operation("softplus")
def softplus(result: Result, x: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
    """log(1 + exp(beta · x)) / beta, and x itself beyond the threshold."""
    scaled = x * beta
    return jnp.where(scaled > threshold, x, (jax.nn.softplus(scaled) / beta).astype(x.dtype))


@operation("round")
def rounded(result: Result, x: jax.Array, *, decimals: int = 0) -> jax.Array:
    """x rounded to the nearest even number."""
    return jnp.round(x, decimals)


@operation("bitwise_left_shift", "__lshift__")
def left_shift(result: Result, x: Any, count: Any) -> jax.Array:
    """x · 2 ** count."""
    return jnp.left_shift(cast(x, result.dtype), cast(count, result.dtype))


@operation("bitwise_right_shift", "__rshift__")
def right_shift(result: Result, x: Any, count: Any) -> jax.Array:
    """x // 2 ** count."""
    return jnp.right_shift(cast(x, result.dtype), cast(count, result.dtype))


@operation("addcmul")
def addcmul(result: Result, x: Any, a: Any, b: Any, *, value: Any = 1) -> jax.Array:
    """x + value · a · b."""
    return cast(x, result.dtype) + value * cast(a, result.dtype) * cast(b, result.dtype)


@operation("lerp")
def lerp(result: Result, start: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    """start + weight · (end − start)."""
    return start + cast(weight, result.dtype) * (end - start)


@operation("view_as_complex")
def view_as_complex(result: Result, x: jax.Array) -> jax.Array:
    """x: [..., 2] as complex numbers [...]."""
    return jax.lax.complex(x[..., 0], x[..., 1])


@operation("view_as_real", "view_as_real_copy")
def view_as_real(result: Result, x: jax.Array) -> jax.Array:
    """Complex x: [...] as real numbers [..., 2]."""
    return jnp.stack([x.real, x.imag], -1)


@operation("polar")
def polar(result: Result, magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    """The complex number of a magnitude and an angle."""
    return jax.lax.complex(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))


@operation("complex")
def complex_of(result: Result, real: jax.Array, imaginary: jax.Array) -> jax.Array:
    """The complex number of two parts."""
    return jax.lax.complex(real, imaginary)
