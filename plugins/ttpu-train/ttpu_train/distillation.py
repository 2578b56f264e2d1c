"""What `Trainer(method="distill")` does beside training on the data's own tokens: a teacher model says how likely each
next token is, and the student learns that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.argument_kinds import check_fields
from ttpu_train.arguments import TrainingArguments
from ttpu_train.objectives import Distill
from ttpu_train.runner import TrainRunner

NAMES = ("teacher_model", "teacher_load_options", "lmbda", *(one.name for one in fields(Distill)))
"""The arguments of the method."""
WITHOUT_MEANING = ("label_smoothing_factor", "z_loss", "router_aux_loss_coef")
"""Training arguments that say something of the cross-entropy of the next tokens."""


@runtime_checkable
class Learns(Protocol):
    """A runner whose model can learn from another one."""

    def teach(self, source: str | Path, load_options: Mapping[str, Any], tokenizer: Any) -> None:
        """Load a teacher onto the devices of the training.

        Args:
            source: a checkpoint's folder or Hub id.
            load_options: `ttpu_core.loading.LoadOptions` of the teacher by name.
            tokenizer: the student's, or None.

        Raises:
            RequestError: its vocabulary is not the student's.
        """
        ...


@dataclass(frozen=True)
class DistillMethod:
    """Distillation as a trainer runs it.

    Attributes:
        objective: what the backend's runner minimizes.
        teacher: a checkpoint's folder or Hub id.
        load_options: of the teacher.
    """

    objective: Distill
    teacher: str | Path
    load_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> DistillMethod:
        """The method with arguments by name.

        Raises:
            RequestError: no teacher, or a value out of range.
            UnsupportedError: completions that the student samples.
        """
        given = dict(given)
        teacher, options = given.pop("teacher_model", None), given.pop("teacher_load_options", None) or {}
        if not isinstance(teacher, str | Path) or not isinstance(options, Mapping):
            raise RequestError(
                f"method='distill' was given with teacher_model={str(teacher)[:60]!r} and teacher_load_options="
                f"{str(options)[:60]!r}, but a student learns from a checkpoint: pass its folder or Hub id, and "
                "options as a mapping."
            )
        if given.pop("lmbda", 0):
            raise UnsupportedError(
                "lmbda above 0 was given with method='distill', but a student learns from the completions of the data, "
                "not from its own: leave it out, which is lmbda=0."
            )
        objective = Distill(**given)
        check_fields(objective)
        within = 0 <= objective.beta <= 1
        share = 0 <= objective.cross_entropy_weight <= 1
        for name, holds, allowed in (
            ("beta", within, "from 0 (forward divergence) to 1 (reverse divergence)"),
            ("temperature", objective.temperature > 0, "above 0"),
            ("cross_entropy_weight", share, "from 0 to 1, the share of the cross-entropy"),
        ):
            if not holds:
                raise RequestError(
                    f"{name}={getattr(objective, name)!r} was given with method='distill', but it is {allowed}: "
                    "correct it."
                )
        return cls(objective, teacher, dict(options))

    def check(self, args: TrainingArguments) -> None:
        """Refuse training arguments that would have no effect.

        Raises:
            RequestError: there are some.
        """
        usual = {one.name: one.default for one in fields(TrainingArguments)}
        given = [name for name in WITHOUT_MEANING if getattr(args, name) != usual[name]]
        if given:
            raise RequestError(
                f"{', '.join(given)} was given with method='distill', whose loss is the divergence from a teacher: "
                "leave it out."
            )

    def teach(self, runner: TrainRunner, tokenizer: Any) -> None:
        """Load the teacher.

        Raises:
            UnsupportedError: the backend's runner has no teachers.
            RequestError: its vocabulary is not the student's.
        """
        if not isinstance(runner, Learns):
            raise UnsupportedError(
                "method='distill' was asked for, but this backend trains on tokens alone: use backend='jax'."
            )
        runner.teach(self.teacher, self.load_options, tokenizer)
