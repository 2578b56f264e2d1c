"""The figures of updates and evaluations: from arrays of one program's results to values on the host."""

from __future__ import annotations

import math
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


def names_of(sums: LossSums) -> tuple[str, ...]:
    """The names of the objective's figures in the order of a program's results. They are sorted, because JAX sorts the
    keys of a dictionary in some programs and keeps their order in others."""
    return tuple(sorted(sums.metrics))


def of_update(figures: Figures) -> jax.Array:
    """The figures in the order of `Updated` and `names_of`, in one array [figures] that one transfer brings to the
    host. A figure of the objective that no example of the batch has is NaN."""
    sums, names = figures.sums, names_of(figures.sums)
    return jnp.stack(
        [
            figures.loss,
            mean_of(sums, sums.cross_entropy),
            sums.weight,
            figures.grad_norm,
            figures.learning_rate,
            figures.skipped.astype(jnp.float32),
            *(jnp.where(count > 0, total / count, jnp.nan) for total, count in map(sums.metrics.__getitem__, names)),
        ]
    )


def of_evaluation(sums: LossSums) -> jax.Array:
    """The sums in the order of `Evaluated` and `names_of`, in one array [figures]."""
    divisor = sums.weight if sums.divisor is None else sums.divisor
    metrics = [figure for name in names_of(sums) for figure in sums.metrics[name]]
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
    """The figures of `of_update`, on the host, without those of the objective that no example of the batch has.

    Args:
        names: of the objective's figures, as `names_of` gives them.
        loss, cross_entropy, tokens, grad_norm, learning_rate, skipped, *metrics: in the order of `of_update`.
    """
    named = {name: value for name, value in zip(names, metrics, strict=True) if not math.isnan(value)}
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
        names: of the objective's figures, as `names_of` gives them.
        cross_entropy, tokens, correct, total, divisor, *metrics: in the order of `of_evaluation`.
    """
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    return Evaluated(cross_entropy, tokens, correct, total, divisor, dict(zip(names, pairs, strict=True)))
