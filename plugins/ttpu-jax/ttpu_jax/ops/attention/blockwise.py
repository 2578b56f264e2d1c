"""Softmax over blocks of keys, inside kernels: the largest score so far, the sum of exponentials less it, and the sum
of values times them, are kept from block to block."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.blocks import LANES
from ttpu_jax.ops.attention.reference import MASKED

LOWEST = MASKED / 10
"""Where the largest score begins: above the scores of hidden keys, whose exponentials are therefore zero."""


class Weights(NamedTuple):
    """What one more block makes of a head's queries: largest and total [queries, 1] with it, what is `kept` of the
    state before [queries, 1], the block's `shares` [queries, keys], exponentials of scores less the largest, and the
    `most` of these [queries, 1]."""

    largest: jax.Array
    total: jax.Array
    kept: jax.Array
    shares: jax.Array
    most: jax.Array


class Running(NamedTuple):
    """The state of a head's queries: largest and total [queries, 1], mixed [queries, value_dim], all float32."""

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def start(cls, sinks: jax.Array, features: int) -> Running:
        """The state before the first block: of `sinks` [queries, 1], logits of attention sinks, or -inf for none."""
        some = sinks > -jnp.inf
        total = jnp.where(some, 1.0, 0.0)
        return cls(jnp.where(some, sinks, LOWEST), total, jnp.zeros((len(sinks), features), jnp.float32))

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
        scales: tuple[jax.Array, jax.Array] | None = None,
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
            scales: float32 [1, keys] each, of keys and of values, where these are integers.
        """
        of_keys, of_values = (None, None) if scales is None else scales
        scores = scored(query, key, hidden, spec, keys_last=keys_last, beside=beside, scale=of_keys)
        return self.mixed_with(self.weighed(scores), value, values_last=values_last, scale=of_values)

    def weighed(self, scores: jax.Array) -> Weights:
        """The shares of one more block, of which the queries' `scores` [queries, keys] are given."""
        own = scores.max(axis=1, keepdims=True)
        largest = jnp.maximum(self.largest, own)
        shares, kept = jnp.exp(scores - largest), jnp.exp(self.largest - largest)
        total = self.total * kept + shares.sum(axis=1, keepdims=True)
        return Weights(largest, total, kept, shares, jnp.exp(own - largest))

    def mixed_with(
        self, weights: Weights, value: jax.Array, *, values_last: bool = False, scale: jax.Array | None = None
    ) -> Running:
        """The state after the block of these weights, of value [keys, value_dim], or [value_dim, keys] if
        `values_last`, and `scale` [1, keys] of values, where these are integers."""
        shares = weights.shares if scale is None else weights.shares * scale
        return self.after(weights, _product(shares.astype(value.dtype), value, 1 if values_last else 0))

    def after(self, weights: Weights, mixed: jax.Array) -> Running:
        """The state after the block of these weights, whose values give `mixed` [queries, value_dim]."""
        return Running(weights.largest, weights.total, self.mixed * weights.kept + mixed)

    def result(self) -> jax.Array:
        """[queries, value_dim] in float32; zeros of queries that see nothing."""
        return self.mixed / jnp.where(self.total == 0.0, 1.0, self.total)


def scored(
    query: jax.Array,
    key: jax.Array,
    hidden: jax.Array,
    spec: AttentionSpec,
    *,
    keys_last: bool = False,
    beside: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """The scores [queries, keys] of one block of keys, in float32.

    Args:
        query: [queries, head_dim].
        key: [keys, head_dim].
        hidden: bool [queries or 1, keys].
        spec: scale and softcap.
        keys_last: key is [head_dim, keys].
        beside: float32 [queries, keys], what other features add to the scores before they are scaled.
        scale: float32 [1, keys] of keys, where these are integers.
    """
    found = _product(query, key, 0 if keys_last else 1)
    return masked(found if beside is None else found + beside, hidden, spec, scale)


def masked(products: jax.Array, hidden: jax.Array, spec: AttentionSpec, scale: jax.Array | None = None) -> jax.Array:
    """The scores [queries, keys] of products [queries, keys] of queries and keys, where `hidden` [queries or 1, keys]
    says which are not seen; `scale` is float32 [1, keys] of keys, where these are integers."""
    scores = products * (spec.softmax_scale if scale is None else scale * spec.softmax_scale)
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    return jnp.where(hidden, MASKED, scores)


def _product(x: jax.Array, other: jax.Array, over: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if other.dtype == jnp.float32 else None
    dims = (((1,), (over,)), ((), ()))
    return jax.lax.dot_general(x, other, dims, preferred_element_type=jnp.float32, precision=precision)


class KeptRunning:
    """The states of several heads in VMEM, from one block of keys to the next: largest and total [heads, queries,
    128], of which all lanes are equal, and mixed [heads, queries, value_dim]."""

    def __init__(self, largest: Any, total: Any, mixed: Any) -> None:
        self.largest, self.total, self.mixed = largest, total, mixed

    @staticmethod
    def scratch(heads: int, queries: int, features: int) -> list[Any]:
        """The memory of the three."""
        return [pltpu.VMEM((heads, queries, size), jnp.float32) for size in (LANES, LANES, features)]

    def start(self, sinks: Any = None) -> None:
        """Begin, with logits of attention sinks [heads, queries, 1], or -inf for none."""
        heads, queries, features = self.mixed.shape
        for head in range(heads):
            none = jnp.full((queries, 1), -jnp.inf, jnp.float32)
            self.store(head, Running.start(none if sinks is None else sinks[head], features))

    def load(self, head: int, first: int = 0, count: int | None = None) -> Running:
        """The state of a head's queries, or of `count` of them from `first` on."""
        at = pl.ds(first, self.mixed.shape[1] if count is None else count)
        return Running(self.largest[head, at, :1], self.total[head, at, :1], self.mixed[head, at, :])

    def store(self, head: int, state: Running, first: int = 0) -> None:
        """Keep the state of a head's queries from `first` on."""
        count = len(state.mixed)
        at = pl.ds(first, count)
        self.largest[head, at, :] = jnp.broadcast_to(state.largest, (count, LANES))
        self.total[head, at, :] = jnp.broadcast_to(state.total, (count, LANES))
        self.mixed[head, at, :] = state.mixed
