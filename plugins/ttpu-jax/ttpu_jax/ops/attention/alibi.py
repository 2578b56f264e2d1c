"""Scores of queries and keys as the softmax reads them: scaled, and with ALiBi's position biases (arXiv 2108.12409)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import AttentionSpec


def slopes(spec: AttentionSpec) -> jax.Array | None:
    """The slope of each query head, float32 [kv_heads, q_per_kv]; None without ALiBi."""
    if spec.alibi is None:
        return None
    return jnp.asarray(np.reshape(spec.alibi.slopes(spec.num_heads), (spec.num_kv_heads, spec.q_per_kv)), jnp.float32)


def scaled(
    scores: jax.Array,
    spec: AttentionSpec,
    query_positions: jax.Array,
    key_positions: jax.Array,
    slopes: jax.Array | None,
) -> jax.Array:
    """Query-key products times the softmax scale, with ALiBi's biases.

    A bias is the slope times the distance from query to key. Papers and checkpoints multiply the key's position, which
    differs by a constant for each query, and a softmax does not see that.

    Args:
        scores: float32 [batch, kv_heads, q_per_kv, queries, keys].
        spec: the scale, and which ALiBi.
        query_positions: [batch, queries].
        key_positions: [batch, keys], or [1, keys] where all rows have the same.
        slopes: [kv_heads, q_per_kv] of the heads at hand; None without ALiBi.
    """
    if spec.alibi is None or slopes is None:
        return scores * spec.softmax_scale
    each = slopes[None, :, :, None, None]
    if spec.alibi.bfloat16:  # the product of the key's own position is rounded, which a distance would change
        places = _rounded(key_positions.astype(jnp.float32))[:, None, None, None, :]
        bias = _rounded(_rounded(each) * places)
    else:
        bias = each * (key_positions[:, None, :] - query_positions[:, :, None]).astype(jnp.float32)[:, None, None]
    return (scores + bias) * spec.softmax_scale if spec.alibi.scaled else scores * spec.softmax_scale + bias


def _rounded(x: jax.Array) -> jax.Array:
    """float32 values as bfloat16 has them. A pair of casts could be left out by the compiler."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
