"""The selective scan of Mamba (arXiv 2312.00752): a linear recurrence of each channel. Everything is float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens whose states exist at once


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    rates: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
    *,
    chunk: int = CHUNK,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h ← exp(rates dt) h + dt x b;  y = h · c, for each channel, by a parallel scan within each chunk of tokens. The
    gradient keeps only the states between chunks.

    Args:
        x: [batch, seq, channels].
        dt: [batch, seq, channels]; 0 leaves the state unchanged.
        rates: [state_size, channels], below 0.
        b: [batch, seq, state_size].
        c: [batch, seq, state_size].
        state: [batch, state_size, channels], before the first token.
        chunk: tokens per chunk; the sequence may have any length.
        starts: bool [batch, seq], true for tokens before which the state becomes zero; None is nowhere.

    Returns:
        y in x's shape, and the state after the last token.
    """
    batch, seq = x.shape[:2]
    if starts is None:
        starts = jnp.zeros((batch, seq), bool)
    if seq == 1:
        decay, added = _discrete(x, dt, rates, b, starts)
        state = decay[:, 0] * state + added[:, 0]
        return (state * c[:, 0, :, None]).sum(1)[:, None], state

    @jax.checkpoint
    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c, starts = inputs
        decay, added = _discrete(x, dt, rates, b, starts)
        decays, states = jax.lax.associative_scan(_joined, (decay, added), axis=1)
        states = states + decays * state[:, None]
        return states[:, -1], (states * c[..., None]).sum(2)

    chunk = min(chunk, seq)
    inputs = tuple(_in_chunks(each, chunk) for each in (x, dt, b, c, starts))
    after, y = jax.lax.scan(step, state, inputs)
    return y.swapaxes(0, 1).reshape(batch, -1, x.shape[-1])[:, :seq], after


def _discrete(
    x: jax.Array, dt: jax.Array, rates: jax.Array, b: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The factor on the state and what each token adds to it, [batch, seq, state_size, channels]."""
    decay = jnp.where(starts[..., None, None], 0.0, jnp.exp(dt[:, :, None] * rates))
    return decay, (dt * x)[:, :, None] * b[..., None]


def _joined(
    earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Two steps of the recurrence as one."""
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def _in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[batch, seq, ...] → [chunks, batch, chunk, ...]. Padding tokens are zeros, which have no effect."""
    padding = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)
