"""Learning rate schedules by the names and arguments of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.loading import refuse_unknown
from ttpu_train.runner import ScheduleName, ScheduleSettings

SCHEDULES: Mapping[str, ScheduleName] = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
"""transformers' names of schedules → the formulas."""
MINIMA = ("min_lr", "min_lr_rate", "min_lr_ratio")
"""Names of the rate that a schedule ends at: the rate itself, or its share of the peak."""
TAKEN: Mapping[str, tuple[str, ...]] = {"cosine": MINIMA, "warmup_stable_decay": ("num_decay_steps", *MINIMA)}
"""What lr_scheduler_kwargs may hold, by formula."""


def schedule_settings(
    name: str, given: Mapping[str, Any], peak: float, warmup_steps: int, total_steps: int
) -> ScheduleSettings:
    """The schedule of a run.

    Args:
        name: transformers' name.
        given: lr_scheduler_kwargs.
        peak: of the learning rate.
        warmup_steps: updates over which the rate rises.
        total_steps: of the run.

    Raises:
        RequestError: an unknown name, one that means nothing to this schedule, or a value that is out of range.
    """
    if name not in SCHEDULES:
        raise RequestError(
            f"lr_scheduler_type={name!r} was given, but it is one of {', '.join(SCHEDULES)}: pass one of these."
        )
    formula = SCHEDULES[name]
    taken = TAKEN.get(formula, ())
    if given and not taken:
        raise RequestError(
            f"lr_scheduler_kwargs={dict(given)!r} was given, but lr_scheduler_type={name!r} takes none: leave it out, "
            f"or use {', '.join(TAKEN)}."
        )
    refuse_unknown(given, taken, "lr_scheduler_kwargs", name)
    lowest = [key for key in MINIMA if given.get(key) is not None]
    if len(lowest) > 1:
        raise RequestError(
            f"lr_scheduler_kwargs has {' and '.join(lowest)}, which say the same thing twice: give one of them."
        )
    if name == "cosine_with_min_lr" and not lowest:
        raise RequestError(
            "lr_scheduler_type='cosine_with_min_lr' was given without the rate that it ends at: add "
            "lr_scheduler_kwargs={'min_lr_rate': 0.1}, a share of the peak, or min_lr, or use cosine."
        )
    highest = peak if lowest == ["min_lr"] else 1
    for key in lowest:
        value = given[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
            raise RequestError(
                f"lr_scheduler_kwargs has {key}={value!r}, but it is a number from 0 to {highest:g}: correct it."
            )
    decay = given.get("num_decay_steps")
    whole = isinstance(decay, int) and not isinstance(decay, bool) and decay >= 1
    if formula == "warmup_stable_decay" and not whole:
        raise RequestError(
            f"lr_scheduler_type={name!r} was given with num_decay_steps={decay!r}, but it needs the number of updates "
            "over which the rate falls at the end: add lr_scheduler_kwargs={'num_decay_steps': 100}."
        )
    share = sum(float(given[key]) for key in lowest)
    if lowest == ["min_lr"]:
        share = share / peak if peak else 0.0
    return ScheduleSettings(formula, warmup_steps, total_steps, decay or 0, share)
