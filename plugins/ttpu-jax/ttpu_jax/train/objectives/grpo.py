"""The loss of group relative policy optimization (GRPO, arXiv 2402.03300), with the formulas of TRL's `GRPOTrainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch, hidden_and_balance, with_balance
from ttpu_jax.train.objectives.token_logprobs import token_logprobs

if TYPE_CHECKING:
    from ttpu_train.objectives import GRPO
    from ttpu_train.runner import LossSettings


def grpo_sums(
    model: DecoderModel, params: Params, batch: TokenBatch, settings: GRPO, loss: LossSettings
) -> LossSums:
    """Sum the loss of a batch of completions, as `ttpu_train.objectives.GRPO` describes it.

    Args:
        model: the decoder.
        params: path → weight.
        batch: completions with their advantages.
        settings: of the method.
        loss: of the run, of which the experts' balance and the number of logits that exist at once count.
    """
    extra, mask = batch.extra, (batch.weights != 0).astype(jnp.float32)
    hidden, balance = hidden_and_balance(model, params, batch, loss)
    logprobs, entropies = token_logprobs(model, params, batch, settings.temperature, loss.tokens_at_once, hidden)
    advantages = extra["advantages"][:, None]
    old = jax.lax.stop_gradient(logprobs) if "old_logprobs" not in extra else extra["old_logprobs"]
    log_ratios = jnp.where(mask > 0, logprobs - old, 0.0)
    if settings.importance_sampling_level == "sequence":
        log_ratios = (log_ratios.sum(1) / jnp.maximum(mask.sum(1), 1.0))[:, None]
    ratios = jnp.exp(log_ratios)
    low, high = 1 - settings.epsilon, 1 + settings.epsilon_high
    kept = ratios if settings.delta is None else jnp.minimum(ratios, settings.delta)
    losses = -jnp.minimum(kept * advantages, jnp.clip(ratios, low, high) * advantages)
    if "importance" in extra:
        losses = losses * extra["importance"]

    def token_sum(values: jax.Array) -> jax.Array:
        return jnp.where(mask > 0, values, 0.0).sum()

    tokens = mask.sum()
    below, above = (kept < low) & (advantages < 0), (kept > high) & (advantages > 0)
    of_token = {"entropy": entropies}
    if settings.beta:
        apart = jnp.where(mask > 0, extra["ref_logprobs"] - logprobs, 0.0)
        divergence = jnp.exp(apart) - apart - 1
        if settings.use_bias_correction_kl:
            divergence = divergence * ratios
        losses = losses + settings.beta * divergence
        of_token["kl"] = divergence
    metrics = {name: (token_sum(values), tokens) for name, values in of_token.items()}
    for name, clipped in {"low": below, "high": above, "region": below | above}.items():
        value = clipped.astype(jnp.float32)
        by_row = settings.importance_sampling_level == "sequence"
        sums = (value.sum(), jnp.float32(len(value))) if by_row else (token_sum(value), tokens)
        metrics[f"clip_ratio/{name}_mean"] = sums
    metrics = jax.lax.stop_gradient(metrics)
    total = (jnp.where(mask > 0, losses, 0.0).sum(1) * extra["scales"]).sum()
    cross_entropy = -token_sum(jax.lax.stop_gradient(logprobs))
    return with_balance(
        LossSums(total, cross_entropy, tokens, jnp.float32(0), metrics, extra["shares"].sum()), balance
    )
