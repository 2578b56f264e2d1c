"""Log-probabilities of tokens with their gradients. The logits of a whole batch never exist at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import TokenBatch, token_parts


def token_logprobs(
    model: DecoderModel,
    params: Params,
    batch: TokenBatch,
    temperature: float = 1.0,
    tokens_at_once: int = 512,
    hidden: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each token given those before it, and the entropy of what it was chosen from, both float32
    [batch, seq] in nats. The first token of a row has no meaning.

    Args:
        model: computes the logits.
        params: path → array.
        batch: rows.
        temperature: that logits are divided by.
        tokens_at_once: tokens of each row whose logits exist at once; in the backward pass they are computed again.
        hidden: the residual stream after the final norm, [batch, seq, hidden]; None computes it.
    """
    if hidden is None:
        hidden = model.hidden(params, batch.tokens, batch.positions, batch.segments)
    rows, seq = batch.tokens.shape
    targets = jnp.roll(batch.tokens, -1, axis=1)

    @jax.checkpoint
    def of_part(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(params, x) / temperature
        words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        # A sum over the vocabulary instead of a gather, which a mesh that shards it would need to see whole.
        chosen = jnp.where(words == target[..., None], logits, 0.0).sum(-1)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        fixed = jax.lax.stop_gradient(logits - normalizer[..., None])
        entropy = -jnp.where(jnp.isfinite(fixed), jnp.exp(fixed) * fixed, 0.0).sum(-1)  # padding rows are -inf
        return chosen - normalizer, entropy

    def together(x: jax.Array) -> jax.Array:
        return jnp.roll(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :seq], 1, axis=1)

    parts = token_parts(hidden, tokens_at_once), token_parts(targets, tokens_at_once)
    logprobs, entropies = jax.lax.map(lambda part: of_part(*part), parts)
    return together(logprobs), together(entropies)
