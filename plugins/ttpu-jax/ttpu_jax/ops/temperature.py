"""Scaling of queries by position. In: positions and a `QueryTemperature`; out: one factor per query."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.spec import QueryTemperature


def query_factor(temperature: QueryTemperature, positions: jax.Array) -> jax.Array:
    """float32 [batch, seq] for positions [batch, seq]; 1 for padding, whose positions are negative."""
    steps = jnp.floor((positions.astype(jnp.float32) + temperature.shift) / temperature.period)
    return 1.0 + temperature.scale * jnp.log(temperature.offset + jnp.maximum(steps, 0.0))
