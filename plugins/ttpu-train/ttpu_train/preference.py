"""What `Trainer(method="dpo")`, "orpo", "kto" and "reward" do in place of training on the data's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.argument_kinds import check_fields
from ttpu_train.arguments import TrainingArguments
from ttpu_train.data.loader import BatchLoader
from ttpu_train.data.pairs import PairKind, PairPlanner
from ttpu_train.data.settings import DataSettings
from ttpu_train.objectives import DPO, KTO, ORPO, DPOLoss, KTOLoss, Reward
from ttpu_train.runner import Batch, RowLayout, TrainRunner

METHODS: Mapping[str, type[DPO | ORPO | KTO | Reward]] = {"dpo": DPO, "orpo": ORPO, "kto": KTO, "reward": Reward}
OF_TOKENIZER = "pad_token_id"
"""The field of an objective that the tokenizer decides."""
NAMES = {
    method: tuple(one.name for one in fields(kind) if one.name != OF_TOKENIZER) for method, kind in METHODS.items()
}
"""The arguments of each method."""
WITHOUT_MEANING = (
    "packing",
    "assistant_only_loss",
    "completion_only_loss",
    "document_separator",
    "mixture_weights",
    "overlong",
    "label_smoothing_factor",
    "z_loss",
)
"""Training arguments that say something of texts or of their cross-entropy."""


@runtime_checkable
class Compares(Protocol):
    """A runner that computes preferences."""

    def row_logprobs(self, batch: Batch) -> np.ndarray:
        """float32 [rows of all shares], one share after another: the log-probability of each row's tokens that have
        weight, by the weights as they are."""
        ...


@runtime_checkable
class OpensRewardModels(Protocol):
    """A backend with models whose head gives one number for a text."""

    def open_reward_model(self, source: str | Path, options: Any) -> Any:
        """A model with a checkpoint's layers, and its score head, or a new one where it has none.

        Args:
            source: a checkpoint's folder or Hub id, of a language model or of a reward model.
            options: how it is loaded: `ttpu_core.loading.LoadOptions` of this backend.
        """
        ...


def opened_reward_model(backend: Any, source: Any, options: Mapping[str, Any]) -> Any:
    """A reward model on a backend's devices.

    Args:
        backend: an installed one.
        source: the checkpoint's folder or Hub id.
        options: `ttpu_core.loading.LoadOptions` by name.

    Raises:
        UnsupportedError: the backend has no reward models.
        RequestError: the source is a loaded model.
    """
    if not isinstance(backend, OpensRewardModels):
        raise UnsupportedError(
            f"a reward model was asked for, but the backend {backend.name!r} opens language models alone: use "
            "backend='jax'."
        )
    if not isinstance(source, str | Path):
        raise RequestError(
            f"a reward model was to be made of a loaded {type(source).__name__}, but a checkpoint is opened without "
            "its language model head: pass the checkpoint's folder or Hub id."
        )
    return backend.open_reward_model(source, type(backend).options.read(options, backend.name))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PreferenceMethod:
    """A method that learns from preferences, as a trainer runs it.

    Attributes:
        objective: what the backend's runner minimizes.
    """

    objective: DPO | ORPO | KTO | Reward

    @classmethod
    def read(cls, method: str, given: Mapping[str, Any]) -> PreferenceMethod:
        """The method with arguments by name.

        Raises:
            RequestError: a value out of range.
        """
        objective = METHODS[method](**given)
        check_fields(objective)
        checks: list[tuple[str, Any, bool, str]] = []
        if isinstance(objective, Reward):
            center = objective.center_rewards_coefficient
            checks.append(("center_rewards_coefficient", center, center is None or center >= 0, "0 or more, or None"))
        else:
            checks.append(("beta", objective.beta, objective.beta > 0, "above 0"))
        if isinstance(objective, DPO):
            smoothing, kinds = objective.label_smoothing, get_args(DPOLoss)
            checks.append(
                ("loss_type", objective.loss_type, objective.loss_type in kinds, f"one of {', '.join(kinds)}")
            )
            checks.append(("label_smoothing", smoothing, 0 <= smoothing < 0.5, "from 0 to below 0.5"))
            if objective.loss_type == "exo_pair":
                checks.append(("label_smoothing", smoothing, smoothing > 0, "above 0 with loss_type='exo_pair'"))
            elif objective.loss_type not in ("sigmoid", "robust"):
                checks.append(
                    ("label_smoothing", smoothing, not smoothing, f"0 with loss_type={objective.loss_type!r}")
                )
        if isinstance(objective, KTO):
            kinds = get_args(KTOLoss)
            checks.append(
                ("loss_type", objective.loss_type, objective.loss_type in kinds, f"one of {', '.join(kinds)}")
            )
            for name in ("desirable_weight", "undesirable_weight"):
                checks.append((name, getattr(objective, name), getattr(objective, name) >= 0, "0 or more"))
        for name, value, holds, allowed in checks:
            if not holds:
                raise RequestError(
                    f"{name}={value!r} was given with method={method!r}, but it is {allowed}: correct it."
                )
        return cls(objective)

    def check(self, args: TrainingArguments, *, measures: bool) -> None:
        """Refuse training arguments that would have no effect.

        Args:
            args: of the run.
            measures: compute_metrics is given.

        Raises:
            RequestError: there are some.
        """
        usual = {one.name: one.default for one in fields(TrainingArguments)}
        balances = ("router_aux_loss_coef",) if isinstance(self.objective, Reward) else ()
        given = [name for name in (*WITHOUT_MEANING, *balances) if getattr(args, name) != usual[name]]
        if measures:
            given.append("compute_metrics")
        if given:
            raise RequestError(
                f"{', '.join(given)} was given with method={self.objective.method!r}, which compares whole "
                "completions: leave it out."
            )

    @property
    def kind(self) -> PairKind:
        """What an example is."""
        if not isinstance(self.objective, KTO):
            return "rewards" if isinstance(self.objective, Reward) else "pairs"
        return "labels_and_others" if self.objective.rows_per_example == 2 else "labels"

    @property
    def compares(self) -> bool:
        """Whether completions are compared with a reference's."""
        return not isinstance(self.objective, ORPO | Reward) and not getattr(self.objective, "reference_free", False)

    def objective_for(self, tokenizer: Any) -> DPO | ORPO | KTO | Reward:
        """The objective with what the tokenizer decides: as for TRL, the end of a text is its padding where it has no
        other."""
        if not isinstance(self.objective, Reward):
            return self.objective
        names = ("pad_token_id", "eos_token_id")
        known = [found for name in names if (found := getattr(tokenizer, name, None)) is not None]
        return replace(self.objective, pad_token_id=known[0] if known else None)

    def planner(self, dataset: Any, tokenizer: Any, settings: DataSettings) -> PairPlanner:
        """The rows of a dataset.

        Raises:
            DataError: data that is missing or malformed.
        """
        return PairPlanner(dataset, tokenizer, settings, self.kind)

    def loader(self, planner: PairPlanner, settings: DataSettings, layout: RowLayout) -> BatchLoader:
        """Its batches; `settings.rows` are examples."""
        return BatchLoader(planner, settings, layout.share_index, layout.share_count)

    def refer(self, planner: PairPlanner, runner: TrainRunner, parts: int) -> None:
        """Compute the reference's log-probabilities, by the weights that a run begins with.

        Args:
            planner: of the rows.
            runner: of the training.
            parts: that the batches of this data are computed in.

        Raises:
            UnsupportedError: the backend's runner computes none.
            RequestError: the weights were updated before.
        """
        if not isinstance(runner, Compares):
            raise UnsupportedError(
                f"method={self.objective.method!r} was asked for, but this backend trains on tokens alone: use "
                "backend='jax'."
            )
        if not self.compares or planner.references is not None:
            return
        if runner.step_count:
            raise RequestError(
                "data were to be compared with the model before training, but it was updated already: pass them to "
                "Trainer as eval_dataset."
            )
        planner.compare(runner.row_logprobs, runner.layout.share_index, runner.layout.share_count, parts)
