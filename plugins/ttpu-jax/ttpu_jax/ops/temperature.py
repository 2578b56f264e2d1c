"""Scaling of queries by position, as `QueryTemperature` describes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec import QueryTemperature


def query_factor(temperature: QueryTemperature, positions: jax.Array) -> jax.Array:
    """One float32 factor per query, [batch, seq], for `positions`: [batch, seq]. The factor is 1 for padding, whose
    positions are negative."""
    steps = jnp.floor((positions.astype(jnp.float32) + temperature.shift) / temperature.period)
    return 1.0 + temperature.scale * jnp.log(temperature.offset + jnp.maximum(steps, 0.0))
