"""Rewards of completions and the advantages that follow from them, with the formulas of TRL's `GRPOTrainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_train.grpo.arguments import GRPOArguments, Judge

STD_EPSILON = 1e-4
"""Added to standard deviations of rewards, as in TRL."""


@dataclass(frozen=True)
class Scores:
    """What rewards say of completions that were sampled at once.

    Attributes:
        advantages: float32 [completions]; 0 where no function judged.
        metrics: of the log.
    """

    advantages: np.ndarray
    metrics: dict[str, float]


def scored(
    args: GRPOArguments,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    trainer_state: Any,
) -> Scores:
    """Reward completions and compare those of each group.

    Args:
        args: of the run.
        prompts: of each completion; those of a group are next to each other.
        completions: texts, or lists of one message for prompts of messages.
        completion_ids: their tokens.
        columns: the other columns of the data, repeated for each completion.
        trainer_state: `ttpu_train.callbacks.TrainerState`.

    Raises:
        RequestError: a function returns something else than one number for each completion.
    """
    given = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": trainer_state,
        **columns,
    }
    judged = np.stack([_judged(function, given, len(completions)) for function in args.functions], axis=1)
    rewards = np.nansum(judged * np.asarray(args.weights), axis=1)
    rewards[np.isnan(judged).all(axis=1)] = np.nan
    advantages, deviations = _advantages(rewards, args.num_generations, args.scaling)
    metrics = {"reward": _mean(rewards), "reward_std": _std(rewards)}
    metrics["frac_reward_zero_std"] = float(np.isclose(deviations, 0).mean())
    for place, name in enumerate(names(args.functions)):
        metrics[f"rewards/{name}/mean"] = _mean(judged[:, place])
        metrics[f"rewards/{name}/std"] = _std(judged[:, place])
    return Scores(advantages, metrics)


def names(functions: Sequence[Judge]) -> list[str]:
    """The functions' names in the log; of equal ones the later have a number."""
    result: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        number = sum(one == name or one.startswith(f"{name}_") for one in result)
        result.append(f"{name}_{number + 1}" if name in result else name)
    return result


def _judged(function: Judge, given: Mapping[str, Any], count: int) -> np.ndarray:
    """A function's rewards, float64 [completions]; NaN where it gives None."""
    assert not isinstance(function, str)
    name = names((function,))[0]
    found: Any = function(**given)
    try:
        values = np.asarray([np.nan if one is None else float(one) for one in found], np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"the reward function {name!r} returned {type(found).__name__} {str(found)[:60]!r} for {count} "
            "completions, but a list of one number or None for each is needed: correct it."
        ) from error
    if len(values) != count:
        raise RequestError(
            f"the reward function {name!r} returned {len(values)} rewards for {count} completions: return one for each."
        )
    if np.isinf(values).any():
        raise RequestError(
            f"the reward function {name!r} returned an infinite reward, from which no advantage follows: return finite "
            "numbers."
        )
    return values


def _advantages(rewards: np.ndarray, group: int, scaling: str) -> tuple[np.ndarray, np.ndarray]:
    """Advantages float32 [completions], and the standard deviation of each group, or of all rewards."""
    grouped = rewards.reshape(-1, group)
    centered = grouped - np.array([[_mean(one)] for one in grouped])
    own = np.array([[_std(rewards if scaling == "batch" else one)] for one in grouped])
    if scaling != "none":
        centered = centered / (own + STD_EPSILON)
    return np.nan_to_num(centered, nan=0.0).reshape(-1).astype(np.float32), own


def _mean(values: np.ndarray) -> float:
    """The mean of what is not NaN; NaN without any."""
    found = values[~np.isnan(values)]
    return float(found.mean()) if len(found) else float("nan")


def _std(values: np.ndarray) -> float:
    """The sample's standard deviation of what is not NaN; NaN for fewer than two values."""
    found = values[~np.isnan(values)]
    return float(found.std(ddof=1)) if len(found) > 1 else float("nan")
