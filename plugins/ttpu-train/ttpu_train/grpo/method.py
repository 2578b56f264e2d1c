"""What `Trainer(method="grpo")` does in place of training on given completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.callbacks import TrainerState
from ttpu_train.data.settings import DataSettings
from ttpu_train.grpo.arguments import GRPOArguments, RewardFunction
from ttpu_train.grpo.batches import RolloutBatches
from ttpu_train.grpo.prompts import Prompts
from ttpu_train.grpo.worker import RolloutWorker
from ttpu_train.objectives import GRPO
from ttpu_train.runner import TrainRunner

NAMES = tuple(one.name for one in fields(GRPOArguments))
WITHOUT_MEANING = (
    "packing",
    "assistant_only_loss",
    "document_separator",
    "mixture_weights",
    "overlong",
    "label_smoothing_factor",
    "z_loss",
    "loss_spike_factor",
    "dataloader_drop_last",
    "dataloader_num_workers",
)
"""Training arguments that say something of given completions or of their cross-entropy."""


@dataclass(frozen=True)
class GRPOMethod:
    """GRPO as a trainer runs it.

    Attributes:
        arguments: of the method.
    """

    arguments: GRPOArguments

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> GRPOMethod:
        """The method with arguments by name.

        Raises:
            RequestError: no reward function, or a value out of range.
        """
        if "reward_funcs" not in given:
            raise RequestError(
                "method='grpo' was given without reward_funcs, but completions are compared by their rewards: pass a "
                "function, or a list of them."
            )
        return cls(GRPOArguments(**given))

    def check(self, args: TrainingArguments, *, evaluates: bool) -> None:
        """Refuse training arguments that would have no effect.

        Args:
            args: of the run.
            evaluates: evaluation data are given.

        Raises:
            RequestError: there are some, or a completion does not fit a row.
        """
        usual = {one.name: one.default for one in fields(TrainingArguments)}
        given = [name for name in WITHOUT_MEANING if getattr(args, name) != usual[name]]
        if evaluates:
            given.append("eval_dataset")
        if given:
            raise RequestError(
                f"{', '.join(given)} was given with method='grpo', which samples its completions and trains on their "
                "rewards alone: leave it out."
            )
        if self.arguments.max_completion_length >= args.max_length:
            raise RequestError(
                f"max_completion_length={self.arguments.max_completion_length} was given with max_length="
                f"{args.max_length}, which is of a prompt with its completion: raise max_length."
            )

    @property
    def has_reward_models(self) -> bool:
        """Whether a model rewards completions."""
        return any(isinstance(one, str) for one in self.arguments.functions)

    @property
    def objective(self) -> GRPO:
        """What the backend's runner minimizes."""
        args = self.arguments
        return GRPO(
            args.beta,
            args.epsilon,
            args.high,
            args.delta,
            args.importance_sampling_level,
            float(args.temperature),
            args.use_bias_correction_kl,
        )

    def batches(
        self,
        dataset: Any,
        tokenizer: Any,
        settings: DataSettings,
        runner: Callable[[], TrainRunner],
        state: TrainerState,
        parts: int,
        reward_model: Callable[[str], RewardFunction],
    ) -> RolloutBatches:
        """The training data.

        Args:
            dataset: prompts.
            tokenizer: the checkpoint's.
            settings: of reading them; `rows` are those of an update.
            runner: makes the trainer's runner.
            state: what reward functions are told of the run.
            parts: that an update is computed in.
            reward_model: opens one by its folder or Hub id, as a reward function.

        Raises:
            DataError: prompts that are missing or too long.
            RequestError: numbers of rows that do not divide each other.
        """
        args = self.arguments
        judges = [reward_model(one) if isinstance(one, str) else one for one in args.functions]
        args = replace(args, reward_funcs=judges)
        longest = settings.max_length - args.max_completion_length
        prompts = Prompts(dataset, tokenizer, settings, longest, shuffle=args.shuffle_dataset)
        length = prompts.longest + args.max_completion_length
        rows = settings.rows * (args.steps_per_generation or parts) // parts

        def worker() -> RolloutWorker:
            return RolloutWorker(runner(), args, length, rows)

        return RolloutBatches(args, prompts, worker, tokenizer, state, settings.seed, settings.rows, parts)
