"""The loss of a reward model, with the formulas of TRL's `RewardTrainer`. Rows without tokens, which fill a batch,
count nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid

from ttpu_core.spec import Parameter, axes
from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.model.loss import LossSums, TokenBatch

if TYPE_CHECKING:
    from ttpu_train.objectives import Reward
    from ttpu_train.runner import LossSettings

SCORE = "head.score"
"""The path of the score head [1, hidden]."""


@dataclass(frozen=True)
class RewardDecoder(DecoderModel):
    """A decoder whose parameters hold a score head beside its own."""

    @cached_property
    def body(self) -> DecoderModel:
        """The decoder without the score head."""
        return DecoderModel(self.spec, self.runtime, self.stacked, self.remat)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The decoder's parameters by Flax path, and the score head."""
        score = Parameter((1, self.spec.embedding.features), (None, axes.EMBED))
        logical = self.runtime.placement.divisible(score.axes, score.shape)
        return {**self.body.parameters, SCORE: Parameter(score.shape, logical)}

    def module(self, params: Params) -> Decoder:
        """Build the decoder over the parameters that are its own."""
        return self.body.module({path: value for path, value in params.items() if path != SCORE})


def rewards_of(
    model: DecoderModel, params: Params, tokens: jax.Array, positions: jax.Array, pad_token_id: int | None
) -> jax.Array:
    """The reward of each row, float32 [batch]: the head's output for the last token that is not `pad_token_id`, as
    transformers chooses it.

    Args:
        model: the decoder.
        params: path → weight, with the score head.
        tokens: int32 [batch, seq].
        positions: int32 [batch, seq], from 0; negative for padding.
        pad_token_id: of the tokenizer.
    """
    hidden = model.hidden(params, tokens, positions)
    real = positions >= 0
    if pad_token_id is not None:
        real = real & (tokens != pad_token_id)
    places = jnp.arange(tokens.shape[1])[None]
    last = jnp.where(real, places, 0).max(1)
    # A sum over the row instead of a gather, which a mesh that shards it would need to see whole.
    chosen = jnp.where((places == last[:, None])[..., None], hidden, 0).sum(1)
    score = params[SCORE][0]
    return jnp.einsum("bh,h->b", chosen, score.astype(chosen.dtype), preferred_element_type=jnp.float32)


def reward_sums(
    model: DecoderModel, params: Params, batch: TokenBatch, settings: Reward, loss: LossSettings
) -> LossSums:
    """Sum the loss of pairs of rows, as `ttpu_train.objectives.Reward` describes it.

    Args:
        model: a `RewardDecoder`.
        params: path → weight.
        batch: a chosen row, then its rejected one.
        settings: of the method.
        loss: not read: no logits of tokens are computed, and transformers' model of this kind balances no experts.
    """
    rewards = rewards_of(model, params, batch.tokens, batch.positions, settings.pad_token_id)
    real = (batch.positions >= 0).any(1).reshape(-1, 2).any(1).astype(jnp.float32)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = batch.extra["margins"][0::2] if "margins" in batch.extra else jnp.zeros_like(chosen)
    losses = -log_sigmoid(chosen - rejected - margins)
    if settings.center_rewards_coefficient:
        losses = losses + settings.center_rewards_coefficient * jnp.square(chosen + rejected)
    pairs = real.sum()
    figures = {
        "accuracy": (chosen > rejected).astype(jnp.float32),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
    }
    metrics = {name: ((value * real).sum(), pairs) for name, value in figures.items()}
    tokens = batch.weights.sum()
    nothing = jnp.float32(0)
    return LossSums((losses * real).sum(), nothing, tokens, nothing, jax.lax.stop_gradient(metrics), pairs)
