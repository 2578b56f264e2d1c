"""The figures of updates and evaluations: from arrays of one program's results to values on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_jax.model.loss import LossSums
from ttpu_jax.train.step import Figures, mean_of

Values = TypeVar("Values")


@dataclass(frozen=True)
class Updated:
    """The figures of an update; see `ttpu_train.runner.StepValues`."""

    loss: float
    cross_entropy: float
    tokens: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """The sums of a batch; see `ttpu_train.runner.EvalValues`."""

    cross_entropy: float
    tokens: float
    correct: float
    total: float
    divisor: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending(Generic[Values]):
    """Figures that devices may still be computing: an array, and what makes values of it."""

    array: jax.Array
    read: Callable[..., Values]

    def ready(self) -> bool:
        """Whether `values` returns without waiting."""
        return bool(cast(Any, self.array).is_ready())

    def values(self) -> Values:
        """The figures, when they are there."""
        return self.read(*(float(one) for one in np.asarray(self.array)))


def of_update(figures: Figures) -> jax.Array:
    """The figures in the order of `Updated`, in one array [figures] that one transfer brings to the host."""
    sums = figures.sums
    return jnp.stack(
        [
            figures.loss,
            mean_of(sums, sums.cross_entropy),
            sums.weight,
            figures.grad_norm,
            figures.learning_rate,
            figures.skipped.astype(jnp.float32),
            *(total / jnp.where(count > 0, count, 1.0) for total, count in sums.metrics.values()),
        ]
    )


def of_evaluation(sums: LossSums) -> jax.Array:
    """The sums in the order of `Evaluated`, in one array [figures]."""
    divisor = sums.weight if sums.divisor is None else sums.divisor
    metrics = [figure for pair in sums.metrics.values() for figure in pair]
    return jnp.stack([sums.cross_entropy, sums.weight, sums.correct, sums.total, divisor, *metrics])


def updated(
    names: tuple[str, ...],
    loss: float,
    cross_entropy: float,
    tokens: float,
    grad_norm: float,
    learning_rate: float,
    skipped: float,
    *metrics: float,
) -> Updated:
    """The figures of `of_update`, on the host.

    Args:
        names: of the objective's figures.
        loss, cross_entropy, tokens, grad_norm, learning_rate, skipped, *metrics: in the order of `of_update`.
    """
    named = dict(zip(names, metrics, strict=True))
    return Updated(loss, cross_entropy, tokens, grad_norm, learning_rate, bool(skipped), named)


def evaluated(
    names: tuple[str, ...],
    cross_entropy: float,
    tokens: float,
    correct: float,
    total: float,
    divisor: float,
    *metrics: float,
) -> Evaluated:
    """The sums of `of_evaluation`, on the host.

    Args:
        names: of the objective's figures.
        cross_entropy, tokens, correct, total, divisor, *metrics: in the order of `of_evaluation`.
    """
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    return Evaluated(cross_entropy, tokens, correct, total, divisor, dict(zip(names, pairs, strict=True)))
