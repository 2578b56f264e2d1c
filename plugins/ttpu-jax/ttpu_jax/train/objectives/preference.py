"""The losses of direct preference optimization (DPO), odds ratio preference optimization (ORPO) and Kahneman-Tversky
optimization (KTO), with the formulas of TRL's trainers. Rows of weight 0, which fill a batch, count nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch, hidden_and_balance, with_balance
from ttpu_jax.train.objectives.token_logprobs import token_logprobs

if TYPE_CHECKING:
    from ttpu_train.objectives import DPO, KTO, ORPO
    from ttpu_train.runner import LossSettings


def completion_logprobs(
    model: DecoderModel, params: Params, batch: TokenBatch, tokens_at_once: int, hidden: jax.Array | None = None
) -> jax.Array:
    """float32 [batch], the log-probability of the tokens of each row that have weight.

    Args:
        model: the decoder.
        params: path → weight.
        batch: rows of tokens.
        tokens_at_once: the number of tokens whose logits exist at once.
        hidden: the residual stream [batch, seq, hidden] if it is computed already.
    """
    found, _ = token_logprobs(model, params, batch, tokens_at_once=tokens_at_once, hidden=hidden)
    return jnp.where(batch.weights != 0, found, 0.0).sum(1)


def dpo_sums(model: DecoderModel, params: Params, batch: TokenBatch, settings: DPO, loss: LossSettings) -> LossSums:
    """Sum the loss of pairs of rows, as `ttpu_train.objectives.DPO` describes it.

    Args:
        model: the decoder.
        params: path → weight.
        batch: a chosen row, then its rejected one.
        settings: of the method.
        loss: of the run, of which the experts' balance and the number of logits that exist at once count.
    """
    hidden, balance = hidden_and_balance(model, params, batch, loss)
    logprobs = completion_logprobs(model, params, batch, loss.tokens_at_once, hidden)
    reference = jnp.zeros_like(logprobs) if settings.reference_free else batch.extra["ref_logps"]
    lengths = (batch.weights != 0).sum(1).astype(jnp.float32)
    real = (lengths.reshape(-1, 2).sum(1) > 0).astype(jnp.float32)
    ratios = logprobs - reference
    chosen, rejected = ratios[0::2], ratios[1::2]
    means = ratios / jnp.maximum(lengths, 1.0)
    losses = dpo_losses(settings, chosen, rejected, means[0::2] - means[1::2])
    metrics = {
        **_rewards(settings.beta * chosen, settings.beta * rejected, real),
        "logps/chosen": ((logprobs[0::2] * real).sum(), real.sum()),
        "logps/rejected": ((logprobs[1::2] * real).sum(), real.sum()),
    }
    return with_balance(_sums((losses * real).sum(), logprobs, lengths, metrics, real.sum()), balance)


def dpo_losses(settings: DPO, chosen: jax.Array, rejected: jax.Array, mean_margin: jax.Array) -> jax.Array:
    """The loss of each pair, float32 [pairs].

    Args:
        settings: the method.
        chosen: [pairs], log of the ratio of the model's and the reference's probability of the chosen completion.
        rejected: [pairs], that of the rejected one.
        mean_margin: [pairs], the difference of both, each divided by its number of tokens.
    """
    beta, smoothing = settings.beta, settings.label_smoothing
    scaled = beta * (chosen - rejected)
    right, wrong = log_sigmoid(scaled), log_sigmoid(-scaled)
    losses: Mapping[str, Callable[[], jax.Array]] = {
        "sigmoid": lambda: -(1 - smoothing) * right - smoothing * wrong,
        "hinge": lambda: relu(1 - scaled),
        "ipo": lambda: jnp.square(mean_margin - 1 / (2 * beta)),
        "sigmoid_norm": lambda: -log_sigmoid(beta * mean_margin),
        "robust": lambda: (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing),
        "exo_pair": lambda: (
            sigmoid(scaled) * (right - jnp.log1p(-smoothing)) + sigmoid(-scaled) * (wrong - jnp.log(smoothing))
        ),
        "nca_pair": lambda: (
            -log_sigmoid(beta * chosen) - 0.5 * log_sigmoid(-beta * chosen) - 0.5 * log_sigmoid(-beta * rejected)
        ),
        "bco_pair": lambda: -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected),
        "sppo_hard": lambda: jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta),
        "apo_zero": lambda: 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected),
        "apo_down": lambda: sigmoid(beta * chosen) + 1 - sigmoid(scaled),
    }
    return losses[settings.loss_type]()


def orpo_sums(model: DecoderModel, params: Params, batch: TokenBatch, settings: ORPO, loss: LossSettings) -> LossSums:
    """Sum the loss of pairs of rows, as `ttpu_train.objectives.ORPO` describes it. The cross-entropy is that of chosen
    rows with their prompts, as the mean over the tokens of the whole batch.

    Args:
        model: the decoder.
        params: path → weight.
        batch: a chosen row, then its rejected one.
        settings: of the method.
        loss: of the run, of which the experts' balance and the number of logits that exist at once count.
    """
    hidden, balance = hidden_and_balance(model, params, batch, loss)
    found, _ = token_logprobs(model, params, batch, tokens_at_once=loss.tokens_at_once, hidden=hidden)
    mask = (batch.weights != 0).astype(jnp.float32)
    lengths = mask.sum(1)
    real = (lengths.reshape(-1, 2).sum(1) > 0).astype(jnp.float32)
    means = jnp.where(mask > 0, found, 0.0).sum(1) / jnp.maximum(lengths, 1.0)
    means = jnp.where(lengths > 0, means, -1.0)  # whatever has finite odds
    chosen, rejected = means[0::2], means[1::2]
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = log_sigmoid(log_odds)
    nll = -jnp.where(_predicted(batch)[0::2] > 0, found[0::2], 0.0).sum()
    share = batch.shared["pairs"] / jnp.maximum(batch.shared["chosen_tokens"], 1.0)
    pairs = real.sum()
    metrics = {
        **_rewards(settings.beta * chosen, settings.beta * rejected, real),
        "logps/chosen": ((chosen * real).sum(), pairs),
        "logps/rejected": ((rejected * real).sum(), pairs),
        "nll_loss": (nll, _predicted(batch)[0::2].sum()),
        "log_odds_ratio": ((ratio * real).sum(), pairs),
        "log_odds_chosen": ((log_odds * real).sum(), pairs),
    }
    total = nll * share - settings.beta * (ratio * real).sum()
    return with_balance(_sums(total, jnp.where(mask > 0, found, 0.0), lengths, metrics, pairs), balance)


def orpo_whole(model: DecoderModel, params: Params, batch: TokenBatch) -> Mapping[str, jax.Array]:
    """The pairs of a batch, and the predicted tokens of its chosen rows."""
    real = (batch.weights != 0).any(1).reshape(-1, 2).any(1)
    return {"pairs": real.sum().astype(jnp.float32), "chosen_tokens": _predicted(batch)[0::2].sum()}


def kto_sums(model: DecoderModel, params: Params, batch: TokenBatch, settings: KTO, loss: LossSettings) -> LossSums:
    """Sum the loss of rows, as `ttpu_train.objectives.KTO` describes it.

    Args:
        model: the decoder.
        params: path → weight.
        batch: completions with their labels, and what the divergence is measured on.
        settings: of the method.
        loss: of the run, of which the experts' balance and the number of logits that exist at once count.
    """
    together = settings.rows_per_example
    batch = every(batch, together, 0)
    hidden, balance = hidden_and_balance(model, params, batch, loss)
    logprobs = completion_logprobs(model, params, batch, loss.tokens_at_once, hidden)
    labels, beta = batch.extra["labels"], settings.beta
    good, bad = (labels == 1).astype(jnp.float32), (labels == 0).astype(jnp.float32)
    ratios = logprobs - batch.extra["ref_logps"]
    if settings.loss_type == "kto":
        shared = batch.shared
        divergence = relu(shared["divergence"] / jnp.maximum(shared["divergence_rows"], 1.0))
        of_good, of_bad = 1 - sigmoid(beta * (ratios - divergence)), 1 - sigmoid(beta * (divergence - ratios))
    else:
        divergence = jnp.float32(0)
        of_good, of_bad = 1 - sigmoid(beta * ratios), sigmoid(beta * ratios)
    losses = settings.desirable_weight * good * of_good + settings.undesirable_weight * bad * of_bad
    rows = good.sum() + bad.sum()
    metrics = {"kl": (divergence * rows, rows)}
    for name, which in {"chosen": good, "rejected": bad}.items():
        metrics[f"rewards/{name}"] = ((which * beta * ratios).sum(), which.sum())
        metrics[f"logps/{name}"] = ((which * logprobs).sum(), which.sum())
    lengths = (batch.weights != 0).sum(1).astype(jnp.float32)
    return with_balance(_sums(losses.sum(), logprobs, lengths, metrics, rows), balance)


def kto_whole(model: DecoderModel, params: Params, batch: TokenBatch, tokens_at_once: int) -> Mapping[str, jax.Array]:
    """The log of the ratio of the model's and the reference's probability of completions that answer other prompts,
    summed over a batch, and their number."""
    batch = every(batch, 2, 1)
    real = (batch.weights != 0).any(1).astype(jnp.float32)
    ratios = completion_logprobs(model, params, batch, tokens_at_once) - batch.extra["ref_logps"]
    return {"divergence": (ratios * real).sum(), "divergence_rows": real.sum()}


def every(batch: TokenBatch, step: int, first: int) -> TokenBatch:
    """Every `step`-th row of a batch from row `first` on."""
    if step == 1:
        return batch
    extra = {name: array[first::step] for name, array in batch.extra.items()}
    segments = None if batch.segments is None else batch.segments[first::step]
    tokens, weights, positions = (array[first::step] for array in (batch.tokens, batch.weights, batch.positions))
    return TokenBatch(tokens, weights, positions, segments, extra, batch.shared)


def _rewards(chosen: jax.Array, rejected: jax.Array, real: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Figures of pairs as TRL names them; all arrays are [pairs]."""
    figures = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "rewards/margins": chosen - rejected,
    }
    return {name: ((value * real).sum(), real.sum()) for name, value in figures.items()}


def _sums(
    total: jax.Array,
    logprobs: jax.Array,
    lengths: jax.Array,
    metrics: Mapping[str, tuple[jax.Array, jax.Array]],
    divisor: jax.Array,
) -> LossSums:
    fixed = jax.lax.stop_gradient(dict(metrics))
    cross_entropy = -jax.lax.stop_gradient(logprobs).sum()
    return LossSums(total, cross_entropy, lengths.sum(), jnp.float32(0), fixed, divisor)


def _predicted(batch: TokenBatch) -> jax.Array:
    """float32 [batch, seq], 1 for each real token but the first of its row."""
    return (batch.positions > 0).astype(jnp.float32)


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of x < 0, without cancellation."""
    near = x > -0.6931471805599453
    return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
