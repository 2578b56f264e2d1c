"""The loss of a model on evaluation data, and its predictions."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_train.runner import Batch, EvalValues, InFlight, TrainRunner

AHEAD = 4
"""Batches that devices may compute while the host prepares the next."""

Progress = Callable[[int], None]
"""Called with the number of batches so far."""


@runtime_checkable
class GathersRows(Protocol):
    """A runner of several processes that exchanges rows between them."""

    def gathered_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows [rows, ...] of each process, one after another: [all rows, ...]; each must call it at the same
        place."""
        ...


@dataclass(frozen=True)
class EvalPrediction:
    """What `compute_metrics` is given, as in transformers.

    Attributes:
        predictions: float32 [rows, seq, vocab]: the logits of each token, given the tokens before and including it, or
            what `preprocess_logits_for_metrics` made of them.
        label_ids: int64 [rows, seq]: the tokens themselves, -100 where they have no weight. `predictions[:, t - 1]`
            predicts `label_ids[:, t]`.
    """

    predictions: np.ndarray
    label_ids: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.predictions, self.label_ids))


@dataclass(frozen=True)
class PredictionOutput:
    """What `Trainer.predict` returns, as in transformers.

    Attributes:
        predictions: as in `EvalPrediction`.
        label_ids: as in `EvalPrediction`.
        metrics: of the data, with the prefix that was asked for.
    """

    predictions: np.ndarray
    label_ids: np.ndarray
    metrics: dict[str, float]


@dataclass
class Totals:
    """What evaluations of several datasets add up to."""

    values: EvalValues = field(default_factory=lambda: EvalValues(0.0, 0.0, 0.0))
    seconds: float = 0.0

    def add(self, values: EvalValues, seconds: float) -> None:
        """Add what one of them gave."""
        self.values, self.seconds = _sum(self.values, values), self.seconds + seconds

    def metrics(self, runner: TrainRunner, prefix: str) -> dict[str, float]:
        """Return what `evaluate` gives of all data together.

        Raises:
            RequestError: no token has a weight.
        """
        return _metrics(runner, self.values, prefix, self.seconds)


def evaluate(
    runner: TrainRunner,
    batches: Iterator[Batch],
    prefix: str = "eval",
    progress: Progress | None = None,
    totals: Totals | None = None,
) -> dict[str, float]:
    """Return loss (nats a token), perplexity, accuracy (the share of tokens that were the likeliest), tokens, seconds
    and tokens per second, with the prefix before each name; of an objective, its loss and its figures in place of
    perplexity and accuracy.

    Args:
        runner: computes it.
        batches: the rows.
        prefix: before each metric's name.
        progress: called with the number of batches so far.
        totals: that the metrics are added to.

    Raises:
        RequestError: no token has a weight.
    """
    began = time.perf_counter()
    flying: deque[InFlight[EvalValues]] = deque()
    total = EvalValues(0.0, 0.0, 0.0)
    for number, batch in enumerate(batches, 1):
        flying.append(runner.evaluate(batch))
        if len(flying) > AHEAD:
            total = _sum(total, flying.popleft().values())
        if progress is not None:
            progress(number)
    for one in flying:
        total = _sum(total, one.values())
    return _counted(runner, total, prefix, time.perf_counter() - began, totals)


def _counted(
    runner: TrainRunner, total: EvalValues, prefix: str, seconds: float, totals: Totals | None
) -> dict[str, float]:
    if totals is not None:
        totals.add(total, seconds)
    return _metrics(runner, total, prefix, seconds)


def _metrics(runner: TrainRunner, total: EvalValues, prefix: str, seconds: float) -> dict[str, float]:
    if total.tokens == 0:
        raise RequestError(
            "an evaluation was asked for, but its data have no token with a weight: give data of which some tokens "
            "are trained on, and rows (max_length) long enough to reach them."
        )
    speed = {
        f"{prefix}_tokens": total.tokens,
        f"{prefix}_runtime": seconds,
        f"{prefix}_tokens_per_second": total.tokens / seconds,
    }
    if runner.settings.objective is not None:
        figures = {f"{prefix}_{name}": value / count for name, (value, count) in total.metrics.items() if count}
        return {f"{prefix}_loss": total.total / (total.divisor or 1.0), **figures, **speed}
    loss = total.cross_entropy / total.tokens
    return {
        f"{prefix}_loss": loss,
        f"{prefix}_perplexity": math.exp(min(loss, 700.0)),
        f"{prefix}_accuracy": total.correct / total.tokens,
        **speed,
    }


def predict(
    runner: TrainRunner,
    batches: Iterator[Batch],
    preprocess: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    prefix: str = "test",
    totals: Totals | None = None,
) -> PredictionOutput:
    """The logits of all rows, of several processes too, because metrics must not differ between them; and what
    `evaluate` gives, of the same pass.

    Args:
        runner: computes them.
        batches: the rows.
        preprocess: called with logits float32 [rows, seq, vocab] and labels [rows, seq] of each batch; what it returns
            is kept in place of the logits.
        prefix: before each metric's name.
        totals: that the metrics are added to.

    Raises:
        RequestError: no token has a weight.
    """
    began = time.perf_counter()
    total = EvalValues(0.0, 0.0, 0.0)
    kept: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for batch in batches:
        values, logits = runner.predict(batch)
        total = _sum(total, values.values())
        of_batch: np.ndarray = np.where(batch.weights > 0, batch.tokens, -100).astype(np.int64)
        rows: np.ndarray = np.asarray((batch.positions >= 0).any(axis=1))  # the last batch is filled up
        made = logits if preprocess is None else np.asarray(preprocess(logits, of_batch))
        if runner.layout.process_count > 1 and isinstance(runner, GathersRows):
            made, of_batch, rows = (runner.gathered_rows(one) for one in (made, of_batch, rows))
        kept.append(made[rows])
        labels.append(of_batch[rows])
    metrics = _counted(runner, total, prefix, time.perf_counter() - began, totals)
    return PredictionOutput(_joined(kept), _joined(labels), metrics)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros((0,))


def _sum(one: EvalValues, other: EvalValues) -> EvalValues:
    metrics = dict(one.metrics)
    for name, (value, count) in other.metrics.items():
        before = metrics.get(name, (0.0, 0.0))
        metrics[name] = before[0] + value, before[1] + count
    return EvalValues(
        one.cross_entropy + other.cross_entropy,
        one.tokens + other.tokens,
        one.correct + other.correct,
        one.total + other.total,
        one.divisor + other.divisor,
        metrics,
    )
