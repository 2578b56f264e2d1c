"""`Trainer`: trains, evaluates and saves a model on any backend, with the arguments and methods of transformers'
Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.files import writing_model
from ttpu_core.spec.training_flops import training_flops
from ttpu_train.arguments import TrainingArguments
from ttpu_train.callbacks import CallbackList, TrainerControl, TrainerState, log_line
from ttpu_train.checkpoints import CHECKPOINTS, Checkpoints
from ttpu_train.data.loader import BatchLoader
from ttpu_train.data.pairs import PairPlanner
from ttpu_train.deepspeed import merged
from ttpu_train.distillation import DistillMethod
from ttpu_train.evaluation import EvalPrediction, PredictionOutput, Totals, evaluate, predict
from ttpu_train.grpo.batches import RolloutBatches
from ttpu_train.grpo.method import GRPOMethod
from ttpu_train.grpo.reward_models import RewardModel
from ttpu_train.inputs import (
    callbacks_in,
    check_kinds,
    check_opened,
    described,
    kept,
    make_folder,
    parts_of,
    plain_metrics,
    training_backend,
    warn_of_long_rows,
)
from ttpu_train.methods import LEARNING_RATES, METHOD_NAMES, method_of
from ttpu_train.objectives import Objective, Reward
from ttpu_train.planned import following_plan, planned_mesh
from ttpu_train.preference import PreferenceMethod, opened_reward_model
from ttpu_train.profiling import ProfileCallback
from ttpu_train.reporting.console import ConsoleReporter
from ttpu_train.reporting.jsonl import JsonLinesReporter
from ttpu_train.reporting.picture import PictureReporter
from ttpu_train.reporting.trackers import trackers
from ttpu_train.resuming import kept_arguments, refuse_earlier_run, resume_run, saved_learning_rate
from ttpu_train.run import TrainingRun
from ttpu_train.run_data import RunData
from ttpu_train.runner import RowLayout, StepSettings, TrainRunner
from ttpu_train.task_evaluation import TaskEvaluation
from ttpu_train.throughput import Meter
from ttpu_train.tokenizer_files import replace_tokenizer


@dataclass(frozen=True)
class TrainOutput:
    """What `Trainer.train` returns, as in transformers.

    Attributes:
        global_step: updates in all.
        training_loss: the mean loss of this call's updates.
        metrics: of this call train_loss, train_runtime (seconds without evaluations), train_tokens and
            train_tokens_per_second; of the whole run total_flos and epoch.
        stopped_by: the name of the signal that ended the run early, or None.
        best_step: the update whose weights load_best_model_at_end restored, or None.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    stopped_by: str | None = None
    best_step: int | None = None


class Trainer:
    """Trains a model.

    Args:
        model: a checkpoint's folder or Hub id, or a model that `AutoModelForTPU.from_pretrained` opened.
        args: how it is trained; or give the fields of `TrainingArguments` by name.
        train_dataset: a file, several files, a `datasets.Dataset`, a sequence of examples, or a mixture of these: see
            docs/training.md. Examples hold text, messages, prompt and completion, or input_ids.
        eval_dataset: the same, for evaluation. Those of a mapping are evaluated one by one, and their names are in the
            metrics (eval_NAME_loss), beside the metrics of all of them together.
        backend: the name of an installed backend; None takes the default.
        processing_class: the tokenizer; None takes the checkpoint's.
        tokenizer: the same.
        callbacks: a list of instances or classes, ttpu's or transformers'.
        compute_metrics: called with an `EvalPrediction` after an evaluation; returns more metrics. The logits of all
            evaluation data are then held in memory, unless `preprocess_logits_for_metrics` makes them smaller.
        preprocess_logits_for_metrics: called with logits [rows, seq, vocab] and labels [rows, seq] of each batch.
        load_options: for opening the model: `ttpu_core.loading.LoadOptions` by name, such as attn_implementation.
        cache_dir: where tokenized data are kept.
        deepspeed: a DeepSpeed configuration, as a JSON file or its content, beside the other arguments.
        method: "sft" trains on the data's own tokens, "grpo" on completions that are sampled and rewarded, "dpo" and
            "orpo" on pairs of completions (prompt, chosen, rejected), "kto" on completions with labels (prompt,
            completion, label), "reward" makes a reward model from pairs, "distill" learns what a teacher predicts.
        **arguments: fields of `TrainingArguments`, and of the method: of `ttpu_train.grpo.arguments.GRPOArguments`; of
            `DPO`, `ORPO`, `KTO` or `Reward` in `ttpu_train.objectives`; or of `Distill` there, with teacher_model and
            teacher_load_options.

    Raises:
        RequestError: an unknown argument, or a value out of range.
        UnsupportedError: the backend trains no models.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | Mapping[str, Any] | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        backend: str | None = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Iterable[Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[np.ndarray, np.ndarray], Any] | None = None,
        load_options: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        deepspeed: str | Path | Mapping[str, Any] | None = None,
        method: str = "sft",
        **arguments: Any,
    ) -> None:
        check_kinds(model, args, load_options, (processing_class, tokenizer))
        every = {**(args if isinstance(args, Mapping) else {}), **arguments}
        self._method_name = method
        self._own_arguments = {key: value for key, value in every.items() if key in METHOD_NAMES.get(method, ())}
        self.method, arguments = method_of(method, args, arguments)
        if isinstance(args, Mapping):
            args = {name: value for name, value in args.items() if name not in METHOD_NAMES.get(method, ())}
        if isinstance(args, TrainingArguments):
            beside = [*arguments, *(() if deepspeed is None else ("deepspeed",))]
            if beside:
                raise RequestError(
                    f"Trainer was given both args and {', '.join(beside)}, which are fields of it: give one of them."
                )
            self.args = args
        else:
            given = {**(args or {}), **arguments}
            self.args = TrainingArguments.read(given if deepspeed is None else merged(given, deepspeed))
        self.args = following_plan(self.args, model, load_options or {})
        self._rate_is_given = self.args.learning_rate is not None
        if not self._rate_is_given:
            self.args = self.args.with_learning_rate(LEARNING_RATES[method])
        if isinstance(self.method, GRPOMethod):
            self.method.check(self.args, evaluates=eval_dataset is not None)
        elif isinstance(self.method, DistillMethod):
            self.method.check(self.args)
        elif self.method is not None:
            self.method.check(self.args, measures=compute_metrics is not None)
        if not (isinstance(self.method, GRPOMethod) and self.method.has_reward_models):  # which are opened beside it
            check_opened(model, self.args.parallelism_strategy, load_options)
        if self.args.eval_strategy != "no" and eval_dataset is None and not self.args.task_names:
            raise RequestError(
                f"eval_strategy={self.args.eval_strategy!r} was asked for, but there is no eval_dataset: give it some "
                "data, or eval_tasks, or leave eval_strategy out."
            )
        if self.args.task_names and method == "reward":
            raise RequestError(
                "eval_tasks was given with method='reward', whose model scores texts and writes none: leave it out."
            )
        self.train_dataset, self.eval_dataset = kept(train_dataset), kept(eval_dataset)
        self.compute_metrics, self._preprocess = compute_metrics, preprocess_logits_for_metrics
        self._source, self._load_options, self._cache_dir = model, dict(load_options or {}), cache_dir
        self._tokenizer = processing_class if processing_class is not None else tokenizer
        self.backend = training_backend(backend if backend is not None else getattr(described(model), "backend", None))
        self.state, self.control = TrainerState(), TrainerControl()
        own = callbacks_in(callbacks)
        self._console = ConsoleReporter(bar=None if self.args.disable_tqdm is None else not self.args.disable_tqdm)
        reporters = trackers(self.args.reporters, all_installed=self.args.reports_to_all)
        self.callbacks = CallbackList([self._console, JsonLinesReporter(), *reporters, PictureReporter(), *own])
        if self.args.profiled is not None:
            self.callbacks.add(ProfileCallback(*self.args.profiled))
        self._runner: TrainRunner | None = None
        self._planners: dict[tuple[int, bool], tuple[Any, PairPlanner]] = {}
        self._store: Checkpoints | None = None
        self.callbacks.call("on_init_end", self.args, self.state, self.control)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class.

        Raises:
            RequestError: it has no event's method.
        """
        self.callbacks.add(callback)

    @cached_property
    def loaded(self) -> Any:
        """The model as its backend opened it, unless it was opened already: with float32 weights, or beside adapters
        with weights in their own dtype."""
        rewards = isinstance(self._objective, Reward)
        if not isinstance(self._source, str | Path) and not rewards:
            return self._source
        from ttpu_core.cli.console import LoadProgress
        from ttpu_core.loading import open_model

        with LoadProgress(quiet=bool(self.args.disable_tqdm)) as progress:
            given = {
                "dtype": "float32" if self.args.adapters is None else "auto",
                "parallelism_strategy": self.args.parallelism_strategy,
                "plan": self.args.plan,
                "purpose": "train",
                "progress": progress,
                **self._load_options,
            }
            if rewards:
                return opened_reward_model(self.backend, self._source, given)
            options = self.backend.options.read(given, self.backend.name)
            return open_model(self._source, options, backend=self.backend.name)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the data."""
        return self._tokenizer if self._tokenizer is not None else getattr(described(self.loaded), "tokenizer", None)

    @property
    def model(self) -> Any:
        """The model with the weights as they are, to generate with."""
        return self.loaded if self._runner is None else self._runner.model()

    @property
    def _spec(self) -> Any:
        """The architecture of a model that describes itself; None of others."""
        return getattr(getattr(described(self.loaded), "architecture", None), "spec", None)

    @cached_property
    def layout(self) -> RowLayout:
        """Which rows of a batch are this process's."""
        return self.backend.row_layout(self.loaded)

    @property
    def runner(self) -> TrainRunner:
        """The backend's runner, made when it is first needed."""
        return self._made_runner(self._total_steps())

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train until the end of the run.

        Args:
            resume_from_checkpoint: True goes on from the newest checkpoint of output_dir, or begins anew where there
                is none; a folder such as `DIR/checkpoints/500`, from that checkpoint; None as the arguments say.

        Raises:
            RequestError: there are no training data, output_dir holds an earlier run that is not resumed, or updates
                were compiled with another learning rate than the checkpoint's.
            TrainingError: the gradients of too many updates in a row are not finite.
            CheckpointError: a checkpoint cannot be written or read.
        """
        if self.train_dataset is None:
            raise RequestError("train() was called on a Trainer without train_dataset: give it some data.")
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        make_folder(self.args.folder)
        if not resume and self.args.save_strategy != "no" and (self._runner is None or not self._runner.step_count):
            refuse_earlier_run(self.args.folder)
        if resume and not self._rate_is_given:
            self._take_rate(saved_learning_rate(resume, self.args.folder))
        total, loader = self._total_steps(), self.training_batches
        runner = self._made_runner(total)
        if isinstance(self.method, PreferenceMethod):
            parts = self.args.gradient_accumulation_steps
            self.method.refer(self._data.planner(self.train_dataset, training=True), runner, parts)
            for data in parts_of(self.eval_dataset) if self.eval_dataset is not None else ():
                self.method.refer(self._data.planner(data, training=False), runner, 1)
        state = self.state
        state.max_steps, state.train_batch_size = total, self._data.rows(training=True) * self.layout.share_count
        passes = total / loader.steps_per_epoch if self.args.max_steps > 0 else self.args.num_train_epochs
        state.num_train_epochs = math.ceil(passes)
        state.is_world_process_zero = state.is_local_process_zero = self.layout.process_index == 0
        store = self._made_store(runner)
        spec = self._spec
        head = not isinstance(self._objective, Reward)
        flops = 0.0 if spec is None else training_flops(spec, self.args.max_length, head=head)
        meter = Meter(flops, self.layout.device_count, runner.peak_flops)
        with_eval = self.args.eval_strategy != "no"
        if with_eval and self._tasks is not None:
            self._tasks.build()
        run = TrainingRun(
            self.args,
            runner,
            loader,
            store,
            state,
            self.control,
            self.callbacks,
            meter,
            self._evaluate,
            lambda step: self.args.folder / CHECKPOINTS / str(step),
            loader.metrics if isinstance(loader, RolloutBatches) else None,
            kept_arguments(self.args, self._method_name, self._own_arguments, state.train_batch_size, total),
        )
        restored = resume and resume_run(run, store, resume, self.args.folder, runner)
        if runner.step_count and not restored:
            raise RequestError(
                f"train() was called again after {runner.step_count:,} updates, but the run would begin anew with "
                "weights that are trained already: pass resume_from_checkpoint=True to go on from the newest "
                "checkpoint, or make a new Trainer of the saved model."
            )
        if restored and state.global_step >= total:
            warnings.warn(
                f"the checkpoint is of update {state.global_step:,}, and the run has {total:,}: nothing is left to do",
                stacklevel=2,
            )
        warn_of_long_rows(self.args.max_length, spec)
        if with_eval and self.eval_dataset is not None:
            for data in parts_of(self.eval_dataset):
                self._loader(data, training=False).close()  # what is wrong with the data is said before hours
        seconds_before, tokens_before = state.train_seconds, state.num_input_tokens_seen
        try:
            stopped_by = run.run()
        except BaseException:
            store.settle()
            raise
        finally:
            self._console.close()
            loader.close()
            del self.training_batches
        best_step = self._restore_best(store) if self.args.load_best_model_at_end else None
        if best_step is not None and stopped_by is None:
            self._record_best(store, best_step)
        seconds, tokens = state.train_seconds - seconds_before, state.num_input_tokens_seen - tokens_before
        metrics = {
            "train_loss": run.mean_loss,
            "train_runtime": seconds,
            "train_tokens": tokens,
            "train_tokens_per_second": tokens / max(seconds, 1e-9),
            "total_flos": state.total_flos,
            "epoch": state.epoch,
        }
        return TrainOutput(state.global_step, run.mean_loss, metrics, stopped_by, best_step)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The loss of evaluation data with the weights as they are, what `compute_metrics` returns, and the epoch;
        without `eval_dataset` also the metrics of `eval_tasks`. They are logged, as those of evaluations in training.

        Args:
            eval_dataset: in place of the trainer's.
            metric_key_prefix: before each metric's name.

        Raises:
            RequestError: there are no evaluation data.
        """
        metrics = self._evaluate(eval_dataset, metric_key_prefix)
        state = self.state
        state.is_world_process_zero = state.is_local_process_zero = self.layout.process_index == 0
        line = log_line(state, metrics)
        metrics = {**metrics, "epoch": state.epoch}
        for event, told in (("on_log", {"logs": line}), ("on_evaluate", {"metrics": metrics})):
            self.callbacks.call(event, self.args, state, self.control, model=self._runner, **told)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """The logits and labels of data, and their metrics.

        Args:
            test_dataset: as `eval_dataset`.
            metric_key_prefix: before each metric's name.

        Raises:
            RequestError: the method is "reward".
        """
        if isinstance(self._objective, Reward):
            raise RequestError(
                "predict() was called with method='reward', but it returns the logits of tokens: call evaluate(), or "
                "score texts with the saved model, which transformers' AutoModelForSequenceClassification loads."
            )
        predicted = self._predict(test_dataset, metric_key_prefix)
        self.callbacks.call(
            "on_predict", self.args, self.state, self.control, model=self._runner, metrics=predicted.metrics
        )
        return predicted

    def save_model(self, output_dir: str | Path | None = None, dtype: str = "bfloat16") -> Path:
        """Write the weights as a Hugging Face checkpoint with its tokenizer, or the adapters that are trained in peft's
        format; return its folder. A tokenizer that the trainer was given is written with both.

        Args:
            output_dir: the folder; None is the trainer's output_dir.
            dtype: of the written weights.

        Raises:
            CheckpointError: the folder cannot be written to, as on a full disk.
        """
        folder = Path(output_dir or self.args.folder)
        with writing_model(folder):
            self.runner.save_pretrained(folder, dtype)
            self._write_tokenizer(folder)
        return folder

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer that the trainer was given, and wait in each process until it is there. If that fails in
        one, it fails in all."""
        error = None
        if self._tokenizer is not None and self.layout.process_index == 0:
            try:
                replace_tokenizer(folder, self._tokenizer)
            except Exception as stopped:  # whatever stopped it, as a full disk
                error = stopped
        if self.layout.process_count > 1 and self.runner.any_process(error is not None) and error is None:
            raise CheckpointError(
                f"a tokenizer was to be written to {folder}, but that failed in another process: make room, or name "
                "another folder."
            )
        if error is not None:
            raise error

    def _evaluate(self, dataset: Any = None, prefix: str = "eval") -> dict[str, float]:
        data = self.eval_dataset if dataset is None else dataset
        if dataset is None and self._tasks is not None:
            of_tasks = self._tasks.metrics(prefix)
            return of_tasks if data is None else {**self._evaluate(data, prefix), **of_tasks}
        if not isinstance(data, Mapping):
            return self._metrics(data, prefix)
        totals = Totals()
        metrics: dict[str, float] = {}
        for name, one in data.items():
            metrics |= self._metrics(one, f"{prefix}_{name}", totals)
        return {**totals.metrics(self.runner, prefix), **metrics}

    def _metrics(self, data: Any, prefix: str, totals: Totals | None = None) -> dict[str, float]:
        """All metrics of one dataset."""
        if self.compute_metrics is not None:
            return self._predict(data, prefix, totals).metrics
        return evaluate(self.runner, self._evaluated(data), prefix, totals=totals)

    def _predict(self, data: Any, prefix: str, totals: Totals | None = None) -> PredictionOutput:
        """Logits, labels and all metrics of data, of one pass through the model."""
        predicted = predict(self.runner, self._evaluated(data), self._preprocess, prefix, totals)
        if self.compute_metrics is not None:
            given = EvalPrediction(predicted.predictions, predicted.label_ids)
            for key, value in plain_metrics(self.compute_metrics(given)).items():
                predicted.metrics[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = value
        return predicted

    def _evaluated(self, data: Any) -> BatchLoader:
        """The batches of evaluation data.

        Raises:
            RequestError: there are none, or the method has no loss of given data.
        """
        if data is None:
            raise RequestError("an evaluation was asked for, but the Trainer has no eval_dataset: give it some data.")
        if isinstance(self.method, GRPOMethod):
            raise RequestError(
                "an evaluation was asked for with method='grpo', whose log shows the rewards of what it samples, and "
                "which has no other loss: evaluate its checkpoint with a Trainer of method='sft'."
            )
        return self._loader(data, training=False)

    def _restore_best(self, store: Checkpoints) -> int | None:
        """Restore the best of the checkpoints that are there, and return its step; None if none was evaluated. Where
        not every evaluation is followed by a checkpoint, that may not be the best evaluation's."""
        best = self.state.best_global_step
        chosen = best if best in store.steps() else store.best_step()
        if chosen is not None:
            store.restore(chosen)
        return chosen

    def _record_best(self, store: Checkpoints, step: int) -> None:
        """Record the best checkpoint for `ttpu export`. A failure is no error: the run has all that it was to leave."""
        try:
            store.record_best(step)
        except CheckpointError as error:
            if self.state.is_world_process_zero:
                warnings.warn(
                    f"the best checkpoint is that of step {step}, which could not be recorded ({error}): pass --step "
                    f"{step} to `ttpu export`, which takes the newest without it",
                    stacklevel=3,
                )

    def _take_rate(self, saved: float | None) -> None:
        """Go on with the learning rate of the checkpoint that is resumed.

        Raises:
            RequestError: updates were compiled with another one.
        """
        if saved is None or saved == self.args.learning_rate:
            return
        if self._runner is not None:
            raise RequestError(
                f"a run with learning_rate={saved:g} was to be resumed without learning_rate, but this Trainer was "
                f"used before train(), and its updates are compiled with {self.args.learning_rate:g}: pass "
                f"learning_rate={saved:g}, or call train() first."
            )
        self.args = self.args.with_learning_rate(saved)

    def _total_steps(self) -> int:
        """The updates of the whole run; 1 without training data."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        if self.train_dataset is None:
            return 1
        return max(1, self.training_batches.steps_of(self.args.num_train_epochs))

    @cached_property
    def _tasks(self) -> TaskEvaluation | None:
        """What runs `eval_tasks`; None without any."""
        if not self.args.task_names:
            return None
        spec = getattr(getattr(described(self.loaded), "architecture", None), "spec", None)
        return TaskEvaluation(self.args, self.runner, self.tokenizer, None if spec is None else spec.context)

    @cached_property
    def training_batches(self) -> BatchLoader | RolloutBatches:
        """The training data from their beginning; made anew for each call of `train`."""
        if isinstance(self.method, GRPOMethod):
            return self.method.batches(
                self.train_dataset,
                self.tokenizer,
                self._data.settings(training=True),
                lambda: self.runner,
                self.state,
                self.args.gradient_accumulation_steps,
                lambda source: RewardModel(source, self._reward_model),
            )
        return self._loader(self.train_dataset, training=True)

    def _reward_model(self, source: str) -> Any:
        """A reward model beside the model in training, divided over the same devices."""
        options = {"dtype": "auto", "purpose": "train", "parallelism_strategy": planned_mesh(self.args)}
        return opened_reward_model(self.backend, source, options)

    @property
    def _data(self) -> RunData:
        vocabulary = getattr(self._spec, "vocab_size", None)
        return RunData(
            self.args, self.method, self.tokenizer, self.layout, vocabulary, self._cache_dir, self._planners
        )

    def _loader(self, dataset: Any, *, training: bool) -> BatchLoader:
        return self._data.loader(dataset, lambda: self.runner, training=training)

    def _made_runner(self, total_steps: int) -> TrainRunner:
        if self._runner is None:
            settings: StepSettings = self.args.step_settings(total_steps)
            self._runner = self.backend.train_runner(self.loaded, replace(settings, objective=self._objective_here()))
            if isinstance(self.method, DistillMethod):
                self.method.teach(self._runner, self.tokenizer)
        return self._runner

    @property
    def _objective(self) -> Objective | None:
        return None if self.method is None else self.method.objective

    def _objective_here(self) -> Objective | None:
        """What is minimized, with what the tokenizer decides."""
        if isinstance(self.method, PreferenceMethod):
            return self.method.objective_for(self.tokenizer)
        return self._objective

    def _made_store(self, runner: TrainRunner) -> Checkpoints:
        if self._store is None:
            folder, policy = self.args.folder / CHECKPOINTS, self.args.checkpoint_policy()
            self._store = Checkpoints(runner, folder, policy, self._tokenizer)
        return self._store
