"""Tasks of the lm-evaluation-harness during a training: a serving engine reads the weights in training and answers
them."""

from __future__ import annotations

from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.registry import default_registry
from ttpu_core.services import Harness, LoadedTasks
from ttpu_train.arguments import TrainingArguments
from ttpu_train.live_engine import LiveEngine
from ttpu_train.runner import TrainRunner

LONGEST = 4096
"""Tokens of a sequence in the engine, unless the model's context is shorter or the options say otherwise."""


class TaskEvaluation:
    """Runs the tasks of `eval_tasks`. Their data are read at once, the engine is built when it is first needed.

    Args:
        args: of the run.
        runner: of the training.
        tokenizer: of the model.
        context: tokens that the model holds; None if unknown.

    Raises:
        MissingDependencyError: the harness is not installed.
        RequestError: a task that does not exist, or there is no tokenizer.
        DataError: the data of a task cannot be read.
        UnsupportedError: the backend's weights cannot be served while they are trained.
    """

    def __init__(self, args: TrainingArguments, runner: TrainRunner, tokenizer: Any, context: int | None) -> None:
        if tokenizer is None:
            raise RequestError(
                "eval_tasks was given, but the model has no tokenizer for the tasks' texts: pass processing_class."
            )
        options = {
            "max_model_len": min(context or LONGEST, LONGEST),
            "sampling_level": "draw",
            "max_logprobs": 1,
            **(args.eval_tasks_engine_options or {}),
            "prompt_logprobs": True,
        }
        self._quiet, self._tokenizer = bool(args.disable_tqdm), tokenizer
        self._max_model_len = int(options["max_model_len"])
        self._live = LiveEngine(runner, options, "eval_tasks")
        harness: Harness = default_registry().service("harness")
        self._tasks: LoadedTasks = harness.load(
            args.task_names,
            num_fewshot=args.eval_tasks_num_fewshot,
            limit=args.eval_tasks_limit,
            apply_chat_template=args.eval_tasks_apply_chat_template,
        )

    def build(self) -> None:
        """Build the engine, so that what it cannot serve is known before the first update.

        Raises:
            UnsupportedError: the engine cannot serve the model or its mesh.
            RequestError: settings that contradict the model or each other, or too little memory.
        """
        if self._live.engine is None:
            with self._live.awake():
                pass

    def metrics(self, prefix: str) -> dict[str, float]:
        """The tasks' metrics with the weights as they are, PREFIX_TASK_METRIC → value.

        Args:
            prefix: before each name.

        Raises:
            TTPUError: a request failed in the engine.
        """
        with self._live.awake() as engine:
            found = self._tasks.evaluate(engine, self._tokenizer, self._max_model_len, quiet=self._quiet)
        return {f"{prefix}_{name}": value for name, value in found.items()}
