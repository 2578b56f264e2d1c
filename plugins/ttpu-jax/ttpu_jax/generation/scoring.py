"""Scores the tokens of texts: the loss of each, and how far a model's predictions are from another model's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec.arithmetic import BITS
from ttpu_core.token_scores import TokenScores
from ttpu_jax.generation.programs import Programs


def text_logits(programs: Programs, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """Compute the logits of whole texts.

    Args:
        programs: of the model.
        tokens: int32 [batch, seq], padded on the right.
        lengths: int [batch], the number of real tokens in each row.

    Returns:
        float32 [batch, seq, vocab], undefined at padding.
    """
    places = np.arange(tokens.shape[1], dtype=np.int32)[None]
    return programs.logits(tokens.astype(np.int32), np.where(places < lengths[:, None], places, np.int32(-1)))


def token_scores(logits: jax.Array, targets: np.ndarray, reference: jax.Array | None = None) -> TokenScores:
    """Compare logits with the tokens that came next, and with another model's logits.

    Args:
        logits: float32 [batch, seq, vocab].
        targets: int32 [batch, seq].
        reference: float32 [batch, seq, vocab]; None for no comparison.
    """
    scores = jax.device_get(_scores(logits, targets, reference))
    return TokenScores(*scores)


def weight_bytes(params: Any) -> int:
    """Sum the bytes of all arrays in a tree of parameters. A 4-bit value counts half a byte."""
    return sum(leaf.size * BITS[leaf.dtype.name] for leaf in jax.tree.leaves(params)) // 8


@jax.jit
def _scores(
    logits: jax.Array, targets: jax.Array, reference: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    log_probabilities = jax.nn.log_softmax(logits)
    best = logits.argmax(-1)
    loss = -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    if reference is None:
        return loss, best == targets, None, None
    expected = jax.nn.log_softmax(reference)
    # A padded vocabulary's logits are -inf in both, and nothing times the difference of infinities is not a number.
    difference = jnp.where(jnp.isfinite(expected), expected - log_probabilities, 0.0)
    divergence = (jnp.exp(expected) * difference).sum(-1)
    return loss, best == targets, divergence, best == reference.argmax(-1)
