"""The training loss of a language model: the cross-entropy of each token in nats, and what is minimized with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.sharding.training_state import ADAMW
from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.moe import load_balancing_loss
from ttpu_jax.model.vocabulary_loss import TokenLoss, sums_over_parts
from ttpu_jax.ops.masters import rounded

if TYPE_CHECKING:
    from ttpu_train.runner import LossSettings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens on devices; the arrays of `ttpu_train.runner.Batch`.

    Attributes:
        tokens: int32 [batch, seq].
        weights: float32 [batch, seq], the weight of predicting each token from those before it; the first token of a
            row is never predicted.
        positions: int32 [batch, seq], from 0 in each sequence; negative for padding.
        segments: int32 [batch, seq], the sequence of each token in its row, from 1; 0 for padding. None: each row holds
            one.
        extra: name → float32 [batch, ...], what an objective reads beside them.
        shared: what is the same for all rows: figures of the whole batch, and weights that are not trained.
    """

    tokens: jax.Array
    weights: jax.Array
    positions: jax.Array
    segments: jax.Array | None = None
    extra: Mapping[str, jax.Array] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, each times its weight, which add up over batches: float32 scalars.

    Attributes:
        total: all that is minimized. Divided by `divisor`, the loss.
        cross_entropy: in nats.
        weight: the weights alone.
        correct: the weight of the tokens that were the likeliest.
        metrics: name → the sum of a figure, and what that is divided by.
        divisor: the number of things that `total` sums over, such as pairs. None: the weight of tokens.
    """

    total: jax.Array
    cross_entropy: jax.Array
    weight: jax.Array
    correct: jax.Array
    metrics: Mapping[str, tuple[jax.Array, jax.Array]] = {}
    divisor: jax.Array | None = None


def summed_loss(model: DecoderModel, params: Params, batch: TokenBatch, settings: LossSettings) -> LossSums:
    """Sum the loss of a batch.

    Logits are computed for `settings.tokens_at_once` tokens of a row at a time, with their gradients, so that those of
    a whole batch never exist at once (`ttpu_jax.model.vocabulary_loss`). The experts' load balance is multiplied by the
    batch's weight, so that for a batch in several parts it is the mean over the parts. `settings.router_aux_loss` of
    None is 0: see `settings_for`.

    Raises:
        RequestError: a router loss for a model without experts.
        UnsupportedError: segments for a model whose recurrent mixers do not reset their states.
    """
    hidden, balance = hidden_and_balance(model, params, batch, settings)
    sums = _over_parts(model, params, hidden, batch, settings.label_smoothing, settings.z_loss, settings.tokens_at_once)
    return sums if balance is None else sums._replace(total=sums.total + balance * sums.weight)


def hidden_and_balance(
    model: DecoderModel, params: Params, batch: TokenBatch, settings: LossSettings
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream of a batch, [batch, seq, hidden], and what the load balance of its experts adds to the mean
    of its losses, a float32 scalar; None if `settings.router_aux_loss` is 0 or None.

    Raises:
        RequestError: a router loss for a model without experts.
        UnsupportedError: segments for a model whose recurrent mixers do not reset their states.
    """
    if not settings.router_aux_loss:
        return model.hidden(params, batch.tokens, batch.positions, batch.segments), None
    hidden, loads = model.hidden_and_loads(params, batch.tokens, batch.positions, batch.segments)
    if loads is None:
        raise RequestError(
            f"router_aux_loss={settings.router_aux_loss} was asked for, but this {model.spec.model_type} model has "
            "no routers: leave it out."
        )
    count = len(loads) * (batch.positions >= 0).sum().astype(jnp.float32)
    return hidden, settings.router_aux_loss * load_balancing_loss(loads.sum(0), count)


def with_balance(sums: LossSums, balance: jax.Array | None) -> LossSums:
    """The sums of an objective with `balance`, a scalar that `hidden_and_balance` gives: it is among its figures as
    "aux_loss", times its coefficient."""
    if balance is None or sums.divisor is None:
        return sums
    summed = balance * sums.divisor
    metrics = {**sums.metrics, "aux_loss": (jax.lax.stop_gradient(summed), jax.lax.stop_gradient(sums.divisor))}
    return sums._replace(total=sums.total + summed, metrics=metrics)


def summed_cross_entropy(model: DecoderModel, params: Params, batch: TokenBatch) -> LossSums:
    """Sum the cross-entropy of a batch, which is all that is minimized."""
    hidden = model.hidden(params, batch.tokens, batch.positions, batch.segments)
    return _over_parts(model, params, hidden, batch, 0.0, 0.0, ADAMW.loss_tokens)


def token_batch(tokens: jax.Array, mask: jax.Array | None = None) -> TokenBatch:
    """A batch in which each token after the first of its row counts 1.

    Args:
        tokens: int [batch, seq].
        mask: bool [batch, seq], true for real tokens; padding is neither attended to nor predicted. None: all are real.
    """
    mask = jnp.ones(tokens.shape, jnp.bool_) if mask is None else mask
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1).astype(jnp.int32)
    weights = (mask & jnp.roll(mask, 1, axis=1)).astype(jnp.float32)
    return TokenBatch(tokens, weights, positions)


def settings_for(settings: LossSettings, config: ModelConfig) -> LossSettings:
    """The settings with the coefficient of the experts' load balance that a model's config asks for, if they name none:
    its `router_aux_loss_coef` if its `output_router_logits` is true, else 0."""
    if settings.router_aux_loss is not None:
        return settings
    asked = bool(config.get("output_router_logits"))
    return replace(settings, router_aux_loss=float(config.get("router_aux_loss_coef") or 0.0) if asked else 0.0)


def next_token_loss(model: DecoderModel, params: Params, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
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
    """Return the summed cross-entropy in nats and the number of predicted tokens, float32 scalars.

    Args:
        model: computes the logits.
        params: Flax path → array.
        tokens: int [batch, seq]; every token but the first of a row is predicted from those before it.
        mask: bool [batch, seq], true for real tokens; padding is neither attended to nor predicted. None: all are real.
        tokens_at_once: number of tokens of each row whose logits are held at once.
    """
    batch = token_batch(tokens, mask)
    hidden = model.hidden(params, tokens, batch.positions)
    sums = _over_parts(model, params, hidden, batch, 0.0, 0.0, tokens_at_once)
    return sums.cross_entropy, sums.weight


def token_parts(x: jax.Array, tokens_at_once: int) -> jax.Array:
    """x [batch, seq, ...] as [parts, batch, size, ...]: the fewest parts of at most `tokens_at_once` tokens of a row,
    of one size, with zeros after the last token."""
    rows, seq, *rest = x.shape
    count = -(-seq // tokens_at_once)
    size = -(-seq // count)
    padded = jnp.pad(x, ((0, 0), (0, count * size - seq), *((0, 0),) * len(rest)))
    return jnp.moveaxis(padded.reshape(rows, count, size, *rest), 1, 0)


def next_tokens(batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
    """The token after each one, int32 [batch, seq], and the weight of predicting it, float32 [batch, seq]: 0 for the
    last of a row."""
    weights = jnp.roll(batch.weights.astype(jnp.float32), -1, axis=1).at[:, -1].set(0.0)
    return jnp.roll(batch.tokens, -1, axis=1), weights


def _over_parts(
    model: DecoderModel,
    params: Params,
    hidden: jax.Array,
    batch: TokenBatch,
    label_smoothing: float,
    z_loss: float,
    tokens_at_once: int,
) -> LossSums:
    """The sums of a batch whose stream is `hidden` [batch, seq, hidden]. Gradients are those of `total` alone, and of
    `cross_entropy` where it is the same."""
    minimized = TokenLoss(label_smoothing, z_loss)
    stream, targets, weights = (token_parts(x, tokens_at_once) for x in (hidden, *next_tokens(batch)))
    ends = rounded({path: params[path] for path in model.head_paths})
    return LossSums(*sums_over_parts(model, ends, stream, targets, weights, minimized))
