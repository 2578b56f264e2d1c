"""The training loss of a stock model: the cross-entropy of each token in nats, and what is minimized with it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_train.runner import Batch, LossSettings


@dataclass(frozen=True)
class Rows:
    """Rows of tokens as a stock model takes them, [rows, seq] each, on the host or on the device.

    Attributes:
        tokens: int64.
        targets: int64, the token after each; of the last, the first.
        weights: float32, of predicting the target.
        positions: int64, from 0 in each sequence; 0 for padding.
        mask: int64, 1 for real tokens; None for packed rows, whose sequences the positions divide.
    """

    tokens: Any
    targets: Any
    weights: Any
    positions: Any
    mask: Any


class Sums(NamedTuple):
    """Sums over the tokens of a batch, each times its weight: float32 scalars.

    Attributes:
        total: all that is minimized. Divided by `weight`, the loss.
        cross_entropy: in nats.
        weight: the weights alone.
        correct: the weight of the tokens that were the likeliest.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    weight: torch.Tensor
    correct: torch.Tensor


def rows_of(batch: Batch, part: slice = slice(None)) -> Rows:
    """Some rows of a batch, on the host.

    In packed rows padding is at position 0, which makes a sequence of each token of it. A row that is all padding
    counts as real: attention to nothing has no value, and its weights are 0 anyway.
    """
    tokens, positions = batch.tokens[part].astype(np.int64), batch.positions[part].astype(np.int64)
    weights = np.roll(batch.weights[part].astype(np.float32), -1, axis=1)
    weights[:, -1] = 0.0
    mask = None
    if batch.segments is None:
        real = positions >= 0
        mask = (real | ~real.any(axis=1, keepdims=True)).astype(np.int64)
    return Rows(tokens, np.roll(tokens, -1, axis=1), weights, np.maximum(positions, 0), mask)


def logits_of(model: Any, rows: Rows, **more: Any) -> Any:
    """The stock model's output for rows on its device, without a cache; `more` are arguments of its forward pass."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        more["position_ids"] = rows.positions
    return model(input_ids=rows.tokens, attention_mask=rows.mask, use_cache=False, **more)


def summed_loss(model: Any, rows: Rows, settings: LossSettings, balance: float) -> Sums:
    """Sum the loss of rows; see `sums_and_logits`."""
    return sums_and_logits(model, rows, settings, balance)[0]


def sums_and_logits(model: Any, rows: Rows, settings: LossSettings, balance: float) -> tuple[Sums, torch.Tensor]:
    """The sums of the loss of rows, and their logits, float32 [rows, seq, vocab], which exist at once.

    Args:
        model: the stock model.
        rows: on its device.
        settings: of the run.
        balance: coefficient of the experts' load balance, see `balance_coefficient`.

    Raises:
        RequestError: a router loss for a model without experts.
    """
    output = logits_of(model, rows, **({"output_router_logits": True} if balance else {}))
    logits = output.logits.float()
    words = torch.arange(logits.shape[-1], device=logits.device)
    # A sum over the vocabulary instead of a gather, which a mesh that shards it would need to see whole.
    chosen = torch.where(words == rows.targets[..., None], logits, 0.0).sum(-1)
    normalizer = logits.logsumexp(-1)
    losses = normalizer - chosen
    minimized = losses
    if settings.label_smoothing:
        share = settings.label_smoothing
        minimized = (1 - share) * losses + share * (normalizer - logits.mean(-1))
    if settings.z_loss:
        minimized = minimized + settings.z_loss * normalizer.square()
    weight = rows.weights.sum()
    total = _summed(minimized, rows.weights)
    if balance:
        loads = getattr(output, "aux_loss", None)
        if not isinstance(loads, torch.Tensor):
            raise RequestError(
                f"router_aux_loss={balance} was asked for, but this {model.config.model_type} model's output has no "
                "aux_loss: leave it out."
            )
        total = total + balance * loads * weight
    likeliest = (chosen >= logits.amax(-1)).float()
    return Sums(total, _summed(losses, rows.weights), weight, _summed(likeliest, rows.weights)), logits


def balance_coefficient(settings: LossSettings, config: Any) -> float:
    """The coefficient of the experts' load balance: the settings', else the one of a model's config if that says
    `output_router_logits`, else 0."""
    if settings.router_aux_loss is not None:
        return settings.router_aux_loss
    asked = bool(getattr(config, "output_router_logits", False))
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if asked else 0.0


def _summed(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.where(weights != 0, weights * values, 0.0).sum()
