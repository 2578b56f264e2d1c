"""The figures of a batch and its logits, of one pass through the model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import jax

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch
from ttpu_jax.train.step import TrainStep


def sums_and_logits(step: TrainStep, params: Mapping[str, Any], batch: TokenBatch) -> tuple[LossSums, jax.Array]:
    """The sums of a batch as `step.sums` gives them, and the logits of its tokens, float32 [batch, seq, vocab].

    Args:
        step: of the run.
        params: path → master weight.
        batch: rows.
    """
    model, weights = step.model, step.computed(params)
    kept = _KeepsHidden(model, batch.tokens)
    sums = replace(step, model=cast(DecoderModel, kept)).sums(weights, batch)
    hidden = kept.stream
    if hidden is None:  # a loss that reads some of the rows
        hidden = model.hidden(weights, batch.tokens, batch.positions, batch.segments)
    return sums, model.logits(weights, hidden)[..., : model.spec.vocab_size]


class _KeepsHidden:
    """A model that keeps the residual stream [batch, seq, hidden] of one array of tokens when it computes that."""

    def __init__(self, model: DecoderModel, tokens: jax.Array) -> None:
        self._model, self._tokens = model, tokens
        self.stream: jax.Array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        found = self._model.hidden(params, tokens, positions, segments)
        self.stream = found if tokens is self._tokens else self.stream
        return found

    def hidden_and_loads(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        found, loads = self._model.hidden_and_loads(params, tokens, positions, segments)
        self.stream = found if tokens is self._tokens else self.stream
        return found, loads
