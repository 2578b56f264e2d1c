"""Linear attention with decay over chunks of tokens, against the recurrence that it stands for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_zoo.jax.lightning_attention import decayed_attention

BATCH, SEQ, HEADS, KEYS, VALUES = 2, 11, 3, 4, 5


def inputs() -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    query, key = (random.normal(size=(BATCH, SEQ, HEADS, KEYS)).astype(np.float32) for _ in range(2))
    value = random.normal(size=(BATCH, SEQ, HEADS, VALUES)).astype(np.float32)
    return query, key, value, -random.uniform(0, 3, size=(BATCH, SEQ, HEADS)).astype(np.float32)


def token_by_token(query: Any, key: Any, value: Any, decay: Any, state: Any, starts: Any = None) -> tuple[Any, Any]:
    out = []
    for i in range(SEQ):
        kept = np.exp(decay[:, i])
        if starts is not None:
            kept = kept * ~starts[:, i, None]
        state = state * kept[..., None, None] + key[:, i, :, :, None] * value[:, i, :, None]
        out.append(np.einsum("bhk,bhkv->bhv", query[:, i], state))
    return np.stack(out, axis=1), state


@pytest.mark.parametrize("chunk", [1, 4, 128])
@pytest.mark.parametrize("several", [False, True])
def test_chunks_compute_the_recurrence(chunk: int, several: bool) -> None:
    state = np.random.default_rng(1).normal(size=(BATCH, HEADS, KEYS, VALUES)).astype(np.float32)
    starts = np.zeros((BATCH, SEQ), bool)
    starts[0, [2, 3, 9]] = starts[1, 0] = several
    expected = token_by_token(*inputs(), state, starts)
    given = jnp.asarray(starts) if several else None
    found = decayed_attention(*map(jnp.asarray, inputs()), jnp.asarray(state), chunk=chunk, starts=given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_gradients_are_finite_where_sequences_start() -> None:
    starts = jnp.zeros((BATCH, SEQ), bool).at[:, 5].set(True)

    def loss(*arrays: jax.Array) -> jax.Array:
        return decayed_attention(*arrays, chunk=4, starts=starts)[0].sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*map(jnp.asarray, inputs()))
    assert all(bool(jnp.isfinite(one).all()) and bool((one != 0).any()) for one in gradients)
