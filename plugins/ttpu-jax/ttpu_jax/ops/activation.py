"""Elementwise activations by the names of `ttpu_core.spec.ActivationSpec`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ActivationSpec

_FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "identity": lambda x: x,
}


def activate(x: jax.Array, spec: ActivationSpec) -> jax.Array:
    """The activation of `x`: [..., features]. The result is [..., features] in x's dtype.

    Raises:
        UnsupportedError: the activation needs parameters or both halves of a gate.
    """
    if spec.name not in _FUNCTIONS:
        raise UnsupportedError(
            f"activation {spec.name!r} was asked for, but the JAX backend has {', '.join(_FUNCTIONS)}: use one of "
            "those, or a custom block."
        )
    return _FUNCTIONS[spec.name](x)


def xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array) -> jax.Array:
    """xIELU (arXiv 2411.13010) of `x`: [..., features], with a learned curvature on each side of zero. The result is
    [..., features] in x's dtype.

    Args:
        x: [..., features].
        alpha_p: [1], whose softplus is the factor of x² where x is positive.
        alpha_n: [1], whose softplus plus beta is the factor of e^x - 1 - x elsewhere.
        beta: [1], the slope at zero.
        eps: [1], a bound just below zero on the exponent.
    """
    alpha_p, alpha_n, beta, eps = (each.astype(x.dtype) for each in (alpha_p, alpha_n, beta, eps))
    above = jax.nn.softplus(alpha_p) * x * x
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(alpha_n))
    return jnp.where(x > 0, above, below) + beta * x


def sparsify(x: jax.Array, sparsity: float) -> jax.Array:
    """relu(x - cutoff) for `x`: [..., features]. The cutoff is the `sparsity` quantile of a normal distribution with
    the features' mean and deviation, so that about 1 - sparsity of the features stay above zero (Spark
    Transformer, arXiv 2506.06644). The result is [..., features]."""
    if not sparsity:
        return x
    multiplier = jax.scipy.special.ndtri(jnp.float32(sparsity)).astype(x.dtype)
    cutoff = x.mean(-1, keepdims=True) + x.std(-1, keepdims=True) * multiplier
    return jax.nn.relu(x - cutoff)


def clamped_swiglu(gate: jax.Array, up: jax.Array, alpha: float = 1.702, limit: float = 7.0) -> jax.Array:
    """gpt_oss's gate: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-`limit`.

    Args:
        gate: [..., features].
        up: [..., features].
        alpha: slope of the sigmoid.
        limit: bound on gate and up.

    Returns:
        [..., features].
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * alpha))


def gated_activation(gate: jax.Array, up: jax.Array, spec: ActivationSpec) -> jax.Array:
    """activation(gate) * up, or `clamped_swiglu` of both.

    Args:
        gate: [..., features].
        up: [..., features].
        spec: the activation.

    Returns:
        [..., features].

    Raises:
        UnsupportedError: the activation needs parameters.
    """
    if spec.name == "clamped_swiglu":
        constants = {"alpha": spec.alpha, "limit": spec.limit}
        return clamped_swiglu(gate, up, **{name: value for name, value in constants.items() if value is not None})
    return activate(gate, spec) * up
