"""The training loss of a language model: the cross-entropy of each next token, in nats."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_core.sharding.training_state import ADAMW
from ttpu_jax.model.causal_model import DecoderModel, Params


def next_token_loss(
    model: DecoderModel, params: Params, tokens: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy of the next tokens in nats, a float32 scalar.

    Args:
        model: computes the logits.
        params: Flax path → array.
        tokens: int [batch, seq]; every token but the first of a row is predicted from those before it.
        mask: bool [batch, seq], true for real tokens; None: all are real.
    """
    total, count = summed_next_token_loss(model, params, tokens, mask)
    return total / jnp.maximum(count, 1)


def summed_next_token_loss(
    model: DecoderModel,
    params: Params,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    *,
    tokens_at_once: int = ADAMW.loss_tokens,
) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy in nats, a float32 scalar, and the number of predicted tokens.

    Logits are computed for `tokens_at_once` tokens of a row at a time, and again in the backward pass, so that the
    logits of a whole batch never exist at once.

    Args:
        model: computes the logits.
        params: Flax path → array.
        tokens: int [batch, seq]; every token but the first of a row is predicted from those before it.
        mask: bool [batch, seq], true for real tokens; padding is neither attended to nor predicted. None: all are real.
        tokens_at_once: number of tokens of each row whose logits are held at once.
    """
    batch, seq = tokens.shape
    mask = jnp.ones(tokens.shape, jnp.bool_) if mask is None else mask
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1).astype(jnp.int32)
    hidden = model.hidden(params, tokens, positions)
    targets = jnp.roll(tokens, -1, axis=1)
    counted = mask & jnp.roll(mask, -1, axis=1).at[:, -1].set(False)
    size = min(seq, tokens_at_once)
    whole = -(-seq // size) * size

    def parts(x: jax.Array) -> jax.Array:
        """[batch, seq, ...] as [parts, batch, size, ...]."""
        padded = jnp.pad(x, ((0, 0), (0, whole - seq), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, whole // size, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def part_loss(x: jax.Array, target: jax.Array, counts: jax.Array) -> jax.Array:
        logits = model.logits(params, x)
        # A sum over the vocabulary instead of a gather, which a mesh that shards it would need to see whole.
        words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        chosen = jnp.where(words == target[..., None], logits, 0.0).sum(-1)
        return jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0).sum()

    losses = jax.lax.map(lambda part: part_loss(*part), (parts(hidden), parts(targets), parts(counted)))
    return losses.sum(), counted.sum()
