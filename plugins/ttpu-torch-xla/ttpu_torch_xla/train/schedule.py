"""The learning rate of each update, computed on the host: the formulas of `transformers.optimization`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_train.runner import ScheduleSettings

INVERSE_SQRT_TIMESCALE = 10_000  # of transformers, without a warm-up


def share_of(settings: ScheduleSettings, number: int) -> float:
    """The share of the peak rate of update `number`, from 0.

    Raises:
        RequestError: an unknown name.
    """
    shares: dict[str, Callable[[int, ScheduleSettings], float]] = {
        "constant": lambda number, settings: 1.0,
        "linear": _linear,
        "cosine": _cosine,
        "inverse_sqrt": _inverse_sqrt,
        "warmup_stable_decay": _warmup_stable_decay,
    }
    if settings.name not in shares:
        raise RequestError(
            f"the schedule {settings.name!r} was asked for, but learning rates follow {', '.join(shares)}: use one of "
            "these."
        )
    if number < settings.warmup_steps:
        # As in transformers, this schedule alone starts at its least rate.
        lowest = settings.min_ratio if settings.name == "warmup_stable_decay" else 0.0
        return lowest + (1 - lowest) * number / max(1, settings.warmup_steps)
    return max(0.0, shares[settings.name](number, settings))


def _linear(number: int, settings: ScheduleSettings) -> float:
    return (settings.total_steps - number) / max(1, settings.total_steps - settings.warmup_steps)


def _cosine(number: int, settings: ScheduleSettings) -> float:
    progress = (number - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    return _falling_cosine(progress, settings.min_ratio)


def _inverse_sqrt(number: int, settings: ScheduleSettings) -> float:
    timescale = settings.warmup_steps or INVERSE_SQRT_TIMESCALE
    return math.sqrt(timescale / max(1.0, number + timescale - settings.warmup_steps))


def _warmup_stable_decay(number: int, settings: ScheduleSettings) -> float:
    progress = (number - (settings.total_steps - settings.decay_steps)) / max(1, settings.decay_steps)
    if progress < 0:
        return 1.0
    return _falling_cosine(progress, settings.min_ratio) if progress < 1 else settings.min_ratio


def _falling_cosine(progress: float, lowest: float) -> float:
    return lowest + (1 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
