"""What `Trainer(method="dpo")`, "orpo" and "kto" do in place of training on the data's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.data.loader import BatchLoader
from ttpu_train.data.pairs import PairKind, PairPlanner
from ttpu_train.data.settings import DataSettings
from ttpu_train.objectives import DPO, KTO, ORPO, DPOLoss, KTOLoss
from ttpu_train.runner import Batch, RowLayout, TrainRunner

METHODS: Mapping[str, type[DPO | ORPO | KTO]] = {"dpo": DPO, "orpo": ORPO, "kto": KTO}
NAMES = {method: tuple(one.name for one in fields(kind)) for method, kind in METHODS.items()}
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
    "router_aux_loss_coef",
)
"""Training arguments that say something of texts or of their cross-entropy."""


@runtime_checkable
class Compares(Protocol):
    """A runner that computes preferences."""

    def row_logprobs(self, batch: Batch) -> np.ndarray:
        """float32 [rows of all processes], in their order: the log-probability of each row's tokens that have weight,
        by the weights as they are."""
        ...


@dataclass(frozen=True)
class PreferenceMethod:
    """A method that learns from preferences, as a trainer runs it.

    Attributes:
        objective: what the backend's runner minimizes.
    """

    objective: DPO | ORPO | KTO

    @classmethod
    def read(cls, method: str, given: Mapping[str, Any]) -> PreferenceMethod:
        """The method with arguments by name.

        Raises:
            RequestError: a value out of range.
        """
        objective = METHODS[method](**given)
        checks: list[tuple[str, Any, bool, str]] = [("beta", objective.beta, objective.beta > 0, "above 0")]
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
        given = [name for name in WITHOUT_MEANING if getattr(args, name) != usual[name]]
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
            return "pairs"
        return "labels_and_others" if self.objective.rows_per_example == 2 else "labels"

    @property
    def compares(self) -> bool:
        """Whether completions are compared with a reference's."""
        return not isinstance(self.objective, ORPO) and not getattr(self.objective, "reference_free", False)

    def planner(self, dataset: Any, tokenizer: Any, settings: DataSettings) -> PairPlanner:
        """The rows of a dataset.

        Raises:
            DataError: data that is missing or malformed.
        """
        return PairPlanner(dataset, tokenizer, settings, self.kind)

    def loader(self, planner: PairPlanner, settings: DataSettings, layout: RowLayout) -> BatchLoader:
        """Its batches; `settings.rows` are examples."""
        return BatchLoader(planner, settings, layout.process_index, layout.process_count)

    def refer(self, planner: PairPlanner, runner: TrainRunner) -> None:
        """Compute the reference's log-probabilities, by the weights that a run begins with.

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
        planner.compare(runner.row_logprobs, runner.layout.process_index, runner.layout.process_count)
