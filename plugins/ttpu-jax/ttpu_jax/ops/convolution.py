"""A causal depthwise convolution over a few tokens, with the inputs before the first token as its state."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_convolution(
    x: jax.Array,
    kernel: jax.Array,
    window: jax.Array | None = None,
    valid: jax.Array | None = None,
    segments: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A depthwise convolution over each token and the kernel - 1 tokens before it.

    Args:
        x: [batch, seq, *features].
        kernel: [kernel, *features]; the last entry weighs the token itself.
        window: [batch, kernel - 1, *features], the inputs before the first token; None is zeros.
        valid: bool [batch, seq], False for padding; None means no padding. The valid tokens of a row are contiguous.
        segments: int [batch, seq], the sequence of each token; the tokens before are of its own sequence alone. None:
            each row is one sequence.
        bias: [*features], added to the result; None adds nothing.

    Returns:
        float32 [batch, seq, *features], and the window after the last valid token in x's dtype.
    """
    width, seq = kernel.shape[0], x.shape[1]
    if window is None:
        window = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    taps = kernel.astype(jnp.float32)

    def tap(i: int) -> jax.Array:
        earlier = inputs[:, i : i + seq].astype(jnp.float32)
        if segments is not None:
            its = jnp.pad(segments, ((0, 0), (width - 1, 0)))[:, i : i + seq]
            earlier = jnp.where((its == segments).reshape(*its.shape, *(1,) * (x.ndim - 2)), earlier, 0)
        return earlier * taps[i]

    out = sum((tap(i) for i in range(width)), jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32))
    if valid is None:
        return out, inputs[:, seq:]
    if seq == 1:
        return out, jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), inputs[:, 1:], inputs[:, :-1])
    end = jnp.where(valid, jnp.arange(1, seq + 1), 0).max(axis=1)
    return out, jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width - 1))(inputs, end)
