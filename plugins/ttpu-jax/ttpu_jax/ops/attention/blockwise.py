"""Softmax over blocks of keys, inside kernels of one or a few queries a row: the largest score so far, the sum of
exponentials less it, and the sum of values times them, are kept from block to block."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.reference import MASKED


class Running(NamedTuple):
    """The state of a head's queries: largest and total [queries, 1], mixed [queries, value_dim], all float32."""

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array

    def attended(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        hidden: jax.Array,
        spec: AttentionSpec,
        *,
        keys_last: bool = False,
        values_last: bool = False,
        beside: jax.Array | None = None,
    ) -> Running:
        """The state after one more block.

        Args:
            query: [queries, head_dim].
            key: [keys, head_dim].
            value: [keys, value_dim]; must be finite where hidden.
            hidden: bool [queries or 1, keys].
            spec: scale and softcap.
            keys_last: key is [head_dim, keys].
            values_last: value is [value_dim, keys].
            beside: float32 [queries, keys], what other features add to the scores before they are scaled.
        """
        precision = jax.lax.Precision.HIGHEST if key.dtype == jnp.float32 else None

        def product(x: jax.Array, other: jax.Array, over: int) -> jax.Array:
            dims = (((1,), (over,)), ((), ()))
            return jax.lax.dot_general(x, other, dims, preferred_element_type=jnp.float32, precision=precision)

        scores = product(query, key, 0 if keys_last else 1)
        scores = (scores if beside is None else scores + beside) * spec.softmax_scale
        if spec.logit_softcap is not None:
            scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
        scores = jnp.where(hidden, MASKED, scores)
        largest = jnp.maximum(self.largest, scores.max(axis=1, keepdims=True))
        shares = jnp.where(hidden, 0.0, jnp.exp(scores - largest))
        kept = jnp.exp(self.largest - largest)
        return Running(
            largest,
            self.total * kept + shares.sum(axis=1, keepdims=True),
            self.mixed * kept + product(shares.astype(value.dtype), value, 1 if values_last else 0),
        )

    def result(self) -> jax.Array:
        """[queries, value_dim] in float32; zeros of queries that see nothing."""
        return self.mixed / jnp.where(self.total == 0.0, 1.0, self.total)
