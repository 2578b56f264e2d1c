"""The methods of a `Trainer` by name, and which arguments are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_train.arguments import USUAL_RATE
from ttpu_train.distillation import NAMES as DISTILLATION_NAMES
from ttpu_train.distillation import DistillMethod
from ttpu_train.grpo.method import NAMES as GRPO_NAMES
from ttpu_train.grpo.method import GRPOMethod
from ttpu_train.preference import NAMES as PREFERENCE_NAMES
from ttpu_train.preference import PreferenceMethod

Method = GRPOMethod | PreferenceMethod | DistillMethod

METHOD_NAMES: Mapping[str, tuple[str, ...]] = {
    "grpo": GRPO_NAMES, "distill": DISTILLATION_NAMES, **PREFERENCE_NAMES
}  # fmt: skip
"""The arguments of each method that are not fields of `TrainingArguments`."""


LEARNING_RATES: Mapping[str, float] = {
    "sft": USUAL_RATE, "dpo": 1e-6, "orpo": 1e-6, "kto": 1e-6, "grpo": 1e-6, "reward": 1e-4, "distill": 2e-5
}  # fmt: skip
"""The learning rate of each method where none is given: of "sft" that of transformers' Trainer, of the others those of
TRL's configurations (DPOConfig, ORPOConfig, KTOConfig, GRPOConfig, RewardConfig, GKDConfig)."""


def method_of(name: str, args: Any, arguments: dict[str, Any]) -> tuple[Method | None, dict[str, Any]]:
    """The method of a trainer, and its other arguments.

    Raises:
        RequestError: an unknown name, or the method's own arguments are wrong.
    """
    if name == "sft":
        return None, arguments
    if name not in METHOD_NAMES:
        raise RequestError(f"method={name!r} was given, but it is sft, {', '.join(METHOD_NAMES)}: pass one of these.")
    given, names = {**(args if isinstance(args, Mapping) else {}), **arguments}, METHOD_NAMES[name]
    own = {key: value for key, value in given.items() if key in names}
    method: Method
    if name in PREFERENCE_NAMES:
        method = PreferenceMethod.read(name, own)
    else:
        method = GRPOMethod.read(own) if name == "grpo" else DistillMethod.read(own)
    return method, {key: value for key, value in arguments.items() if key not in names}
