"""`TrainingArguments`: how a model is trained. Names and meanings are those of `transformers.TrainingArguments`
where it has them, and of TRL's `SFTConfig` for text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ttpu_core.errors import RequestError
from ttpu_core.loading import refuse_unknown
from ttpu_core.sharding.training_state import WITH_MOMENTUM, Optimizer, Remat, UpdateSettings
from ttpu_train.adapters import AdapterSettings, adapter_settings
from ttpu_train.argument_kinds import among, check_fields, need
from ttpu_train.runner import (
    CheckpointPolicy,
    LossSettings,
    OptimizerSettings,
    PipelineSchedule,
    StepSettings,
    ZeroStage,
)
from ttpu_train.schedules import SCHEDULES, schedule_settings

Interval = Literal["no", "steps", "epoch"]

OPTIMIZERS: Mapping[str, Optimizer] = {
    **{name: name for name in get_args(Optimizer)},
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
}
"""Names of optimizers, transformers' among them."""
LESS_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""The ends of metrics' names of which the least is the best."""
NOT_NEGATIVE = (
    "learning_rate", "weight_decay", "warmup_steps", "adam_epsilon", "max_grad_norm", "z_loss", "nan_limit",
    "loss_spike_factor", "hung_step_factor", "seed", "data_seed", "dataloader_num_workers",
)  # fmt: skip
USUAL_RATE = 5e-5
"""The learning rate of transformers' Trainer."""
REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """How a model is trained.

    Args:
        output_dir: the run's folder: checkpoints, `log.jsonl`, the picture of the run.
        per_device_train_batch_size: rows that a device computes at once, of the devices that rows are divided over.
        per_device_eval_batch_size: the same in evaluation.
        gradient_accumulation_steps: parts that the batch of one update is computed in, one after the other.
        num_train_epochs: passes over the training data, unless max_steps is given.
        max_steps: updates; -1 leaves it to the epochs.
        learning_rate: the peak of the schedule; None is the default of the trainer's method, 5e-5 of "sft".
        lr_scheduler_type: linear, cosine, cosine_with_min_lr, constant, constant_with_warmup, inverse_sqrt or
            warmup_stable_decay.
        lr_scheduler_kwargs: min_lr_rate, a share of the peak, or min_lr (cosine_with_min_lr, cosine,
            warmup_stable_decay) and num_decay_steps (warmup_stable_decay, which needs it).
        warmup_steps: updates over which the rate rises, with every schedule; below 1, their share of all updates.
        warmup_ratio: their share of all updates, if warmup_steps is 0.
        optim: adamw, adamw_8bit (moments of 8 bits), adafactor, lion, muon or sgd.
        weight_decay: decoupled; biases and norm scales have none.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the square root of the second moment.
        momentum: of sgd and muon.
        max_grad_norm: the norm that gradients are scaled down to; 0 scales none.
        label_smoothing_factor: the share of a target's probability that is spread over the vocabulary.
        z_loss: coefficient of the squared log of the softmax's denominator.
        router_aux_loss_coef: coefficient of the load balance of experts; None leaves it to the checkpoint's config.
        bf16: compute in bfloat16; None does so on accelerators. Master weights are float32 either way.
        gradient_checkpointing: False is remat="none", True is remat="full" where remat is "auto".
        remat: what is computed again in the backward pass instead of being kept: full, attention, gate, dots, mlp,
            none, or auto, the least that fits.
        zero_stage: 1 shards the optimizer's state, 2 gradients too, 3 weights too; None is 3 on a mesh with an axis
            "fsdp" or "expert", else 0.
        pipeline_schedule: how the parts of `gradient_accumulation_steps` pass the stages of a mesh with the axis
            "stage": "gpipe", or "1f1b", which keeps the activations of fewer parts.
        parallelism_strategy: how the model is sharded, as for `AutoModelForTPU.from_pretrained`.
        plan: a plan to train, or the file that `ttpu plan --task training --save` wrote, in place of
            parallelism_strategy: its mesh counts, and its stage of ZeRO where zero_stage is None.
        offload_optimizer: hold the optimizer's state in the host's memory; an update brings it to the devices layer by
            layer.
        trainable: patterns of the paths of trained parameters, as in "layers.*.attention.*"; None trains all.
        peft_config: train low-rank adapters in place of the weights: the fields of peft's LoraConfig as a mapping, such
            as {"r": 16, "target_modules": "all-linear"}, or a LoraConfig.
        adapter_name_or_path: the folder of an adapter in peft's format to begin with; its config counts for what
            peft_config leaves out.
        max_length: tokens of a row.
        packing: whether a row holds several sequences, each of which sees itself alone.
        dataset_text_field: the field of an example that holds text.
        assistant_only_loss: chats are trained on what the assistant says.
        completion_only_loss: prompts with completions are trained on the completions.
        document_separator: splits text files into documents; None makes each file one.
        mixture_weights: the shares of several sources, in their order; None takes every sequence once in an epoch.
        overlong: what becomes of more than max_length tokens: split, truncate or refuse; None splits text and truncates
            the rest.
        dataloader_num_workers: threads that prepare rows; 0 is one.
        dataloader_drop_last: leave out the rows at the end of an epoch that fill no batch.
        logging_steps: updates between two lines of the log; below 1, a share of all updates.
        logging_first_step: log the first update too.
        eval_strategy: no, steps or epoch: when the evaluation data are used.
        eval_steps: updates between two evaluations; None is logging_steps.
        eval_on_start: evaluate before the first update.
        eval_tasks: tasks of the lm-evaluation-harness that are run at each evaluation, by name or as paths of YAML
            files. Their metrics are eval_TASK_METRIC, as in eval_arc_easy_acc.
        eval_tasks_num_fewshot: examples before each of their questions; None as the tasks say.
        eval_tasks_limit: examples of each task; below 1, their share; None takes all.
        eval_tasks_apply_chat_template: write their prompts as the tokenizer's chat template does.
        eval_tasks_engine_options: of the serving engine that answers them, such as {"max_model_len": 8192}.
        save_strategy: no, steps or epoch: when checkpoints are written. Unless "no", the end of a run writes one too.
        save_steps: updates between two checkpoints; below 1, a share of all updates.
        save_total_limit: checkpoints that stay: the newest ones, and where metric_for_best_model is set the best in
            place of the oldest of them. None keeps all.
        load_best_model_at_end: end with the weights of the best evaluation, which `ttpu export` writes then.
        metric_for_best_model: "loss" (the default with load_best_model_at_end), or another metric; a prefix eval_ may
            be left out.
        greater_is_better: None: unless the metric's name ends in loss, perplexity or bits_per_byte.
        report_to: "all" (those installed), "none", or names among tensorboard, wandb, trackio, mlflow.
        run_name: how these call the run; None is the name of output_dir.
        disable_tqdm: no progress bar; None shows one on a terminal.
        seed: of the order of the data, and of whatever is random in a step.
        data_seed: of the order of the data alone.
        resume_from_checkpoint: True goes on from the newest checkpoint of output_dir, if there is one; a folder, from
            that checkpoint.
        nan_limit: updates in a row whose gradients are not finite, and that are skipped, before the run ends.
        loss_spike_factor: the loss divided by its running mean that counts as a spike; 0 looks for none.
        loss_spike_action: "warn", or "rollback" to the newest checkpoint, past the data that made the spike.
        profile_steps: updates that are traced with the backend's profiler, counted from 1, as in "10-12" or (10, 12);
            None traces none.
        hung_step_factor: an update that takes more than this times the median of those before is reported while it
            still runs; 0 reports none.
        hung_step_seconds: an update that takes longer is reported, the first, which compiles, too; None for no limit.
    """

    output_dir: str | Path = "trainer_output"
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float | None = None
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    optim: str = "adamw"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    momentum: float = 0.0
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    z_loss: float = 0.0
    router_aux_loss_coef: float | None = None
    bf16: bool | None = None
    gradient_checkpointing: bool | None = None
    remat: Remat = "auto"
    zero_stage: ZeroStage | None = None
    pipeline_schedule: PipelineSchedule = "1f1b"
    parallelism_strategy: Any = None
    plan: Any = None
    offload_optimizer: bool = False
    trainable: Sequence[str] | None = None
    peft_config: Any = None
    adapter_name_or_path: str | Path | None = None
    max_length: int = 1024
    packing: bool = False
    dataset_text_field: str = "text"
    assistant_only_loss: bool = False
    completion_only_loss: bool = True
    document_separator: str | None = None
    mixture_weights: Sequence[float] | None = None
    overlong: Literal["split", "truncate", "refuse"] | None = None
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    logging_steps: float = 10
    logging_first_step: bool = False
    eval_strategy: Interval = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    eval_tasks: str | Sequence[str] | None = None
    eval_tasks_num_fewshot: int | None = None
    eval_tasks_limit: float | None = None
    eval_tasks_apply_chat_template: bool = False
    eval_tasks_engine_options: Mapping[str, Any] | None = None
    save_strategy: Interval = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    report_to: str | Sequence[str] = "none"
    run_name: str | None = None
    disable_tqdm: bool | None = None
    seed: int = 42
    data_seed: int | None = None
    resume_from_checkpoint: bool | str | Path | None = None
    nan_limit: int = 10
    loss_spike_factor: float = 0.0
    loss_spike_action: Literal["warn", "rollback"] = "warn"
    profile_steps: str | int | Sequence[int] | None = None
    hung_step_factor: float = 10.0
    hung_step_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: one is out of range, or two contradict each other.
        """
        check_fields(self)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        need(self.max_steps == -1 or self.max_steps >= 1, "max_steps", self.max_steps, "-1 or at least 1")
        need(self.num_train_epochs > 0, "num_train_epochs", self.num_train_epochs, "above 0")
        for name in NOT_NEGATIVE:
            need(getattr(self, name) is None or getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("adam_beta1", "adam_beta2", "momentum", "label_smoothing_factor", "warmup_ratio"):
            need(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("logging_steps", "save_steps", "eval_steps", "eval_tasks_limit"):
            value = getattr(self, name)
            need(value is None or value > 0, name, value, "above 0")
            need(value is None or value < 1 or value % 1 == 0, name, value, "a whole number, or a share below 1")
        among(self.lr_scheduler_type, "lr_scheduler_type", SCHEDULES)
        self._check_schedule()
        among(self.optim, "optim", OPTIMIZERS)
        among(self.remat, "remat", get_args(Remat))
        among(self.eval_strategy, "eval_strategy", get_args(Interval))
        among(self.save_strategy, "save_strategy", get_args(Interval))
        among(self.loss_spike_action, "loss_spike_action", ("warn", "rollback"))
        among(self.pipeline_schedule, "pipeline_schedule", get_args(PipelineSchedule))
        stage = self.zero_stage
        known = stage is None or (isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3)
        need(known, "zero_stage", stage, "0, 1, 2, 3 or None")
        need(self.max_length >= 2, "max_length", self.max_length, "2 or more")
        need(
            self.save_total_limit is None or self.save_total_limit >= 1,
            "save_total_limit",
            self.save_total_limit,
            "1 or more, or None",
        )
        self._check_recomputation()
        if self.plan is not None and self.parallelism_strategy is not None:
            raise RequestError(
                f"plan was given with parallelism_strategy={self.parallelism_strategy!r}, but both name a mesh: give "
                "one of them."
            )
        self._check_companions()
        if self.load_best_model_at_end and (self.eval_strategy == "no" or self.eval_strategy != self.save_strategy):
            raise RequestError(
                f"load_best_model_at_end was asked for with eval_strategy={self.eval_strategy!r} and save_strategy="
                f"{self.save_strategy!r}, but the best checkpoint is one that was evaluated when it was saved: set "
                "both to steps, or both to epoch."
            )
        self._check_that_the_best_is_saved()
        seconds = self.hung_step_seconds
        need(seconds is None or seconds > 0, "hung_step_seconds", seconds, "above 0, or None")
        traced = self.profiled
        wanted = "a number of an update, or the first and the last, as in '10-12'"
        need(traced is None or 1 <= traced[0] <= traced[1], "profile_steps", self.profile_steps, wanted)
        for name in self.reporters:
            among(name, "report_to", REPORTERS)
        self._resolve()
        if self.adapters is not None and self.trainable is not None:
            raise RequestError(
                "trainable was given with adapters, but these leave all weights as they are: name whole modules in "
                "peft_config's modules_to_save, or leave one of the two out."
            )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Arguments by name.

        Raises:
            RequestError: an unknown name, or a value out of range.
        """
        refuse_unknown(given, (one.name for one in fields(cls)), "the trainer", "it", " (see docs/training.md)")
        return cls(**given)

    def with_learning_rate(self, rate: float) -> Self:
        """The same arguments with a learning rate. The rate that the schedule ends at is compared with it in
        `step_settings`, because a resumed run may take yet another one."""
        made = copy(self)
        object.__setattr__(made, "learning_rate", rate)
        return made

    @property
    def adapters(self) -> AdapterSettings | None:
        """The adapters that are trained; None trains weights."""
        if self.peft_config is None and self.adapter_name_or_path is None:
            return None
        return adapter_settings(self.peft_config, self.adapter_name_or_path)

    def update_settings(self) -> UpdateSettings:
        """What the memory of an update depends on, for the planner."""
        return UpdateSettings(
            OPTIMIZERS[self.optim],
            self.momentum,
            self.gradient_accumulation_steps,
            self.recomputed,
            self.zero_stage,
            self.offload_optimizer,
        )

    @property
    def folder(self) -> Path:
        """`output_dir` as a path."""
        return Path(self.output_dir).expanduser()

    @property
    def reporters(self) -> tuple[str, ...]:
        """The names in `report_to`, without "none"; "all" is all that is known."""
        names = (self.report_to,) if isinstance(self.report_to, str) else tuple(self.report_to)
        return REPORTERS if self.reports_to_all else tuple(name for name in names if name != "none")

    @property
    def reports_to_all(self) -> bool:
        """Whether `report_to` is "all", which leaves out trackers that are not installed."""
        return self.report_to == "all" or tuple(self.report_to) == ("all",)

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last update that are traced; (0, 0) if `profile_steps` names none."""
        given = self.profile_steps
        if given is None:
            return None
        parts = given.split("-") if isinstance(given, str) else given if isinstance(given, Sequence) else (given,)
        try:
            numbers = [int(part) for part in parts]
        except (TypeError, ValueError):
            return 0, 0
        return (numbers[0], numbers[-1]) if len(numbers) in (1, 2) else (0, 0)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks in `eval_tasks`."""
        given = self.eval_tasks or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best checkpoint, with its prefix."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def best_is_greatest(self) -> bool:
        """Whether a greater value of it is better."""
        return bool(self.greater_is_better)

    @property
    def recomputed(self) -> Remat:
        """What the backward pass computes again, of `remat` and `gradient_checkpointing`."""
        if self.remat != "auto" or self.gradient_checkpointing is None:
            return self.remat
        return "full" if self.gradient_checkpointing else "none"

    def _check_schedule(self) -> None:
        """Check what the schedule is given. The rate that it ends at is compared with the peak once that is known."""
        peak = math.inf if self.learning_rate is None else self.learning_rate
        schedule_settings(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, peak, 0, 1)

    def _check_recomputation(self) -> None:
        asked = self.gradient_checkpointing
        if asked is not None and self.remat != "auto" and asked == (self.remat == "none"):
            raise RequestError(
                f"gradient_checkpointing={asked} was given with remat={self.remat!r}, but they contradict each other: "
                "give one of them."
            )

    def _check_companions(self) -> None:
        """Refuse arguments that have no effect without another one; warn where a file is often used with that one
        switched off, as by eval_strategy=no."""
        rolls_back = self.loss_spike_action == "rollback"
        for name, is_given, other, is_there in (
            ("momentum", self.momentum > 0, f"optim: {' or '.join(WITH_MOMENTUM)}", self.optim in WITH_MOMENTUM),
            ("loss_spike_action: rollback", rolls_back, "loss_spike_factor, as in 3", self.loss_spike_factor > 0),
            ("loss_spike_action: rollback", rolls_back, "save_strategy: steps or epoch", self.save_strategy != "no"),
        ):
            if is_given and not is_there:
                raise RequestError(
                    f"{name} was given, but it has no effect without {other}: add that, or leave the former out."
                )
        usual = {one.name: one.default for one in fields(self)}
        for names, other, is_there in (
            (("eval_steps", "eval_on_start", "metric_for_best_model"), "eval_strategy", self.eval_strategy != "no"),
            ([name for name in usual if name.startswith("eval_tasks_")], "eval_tasks", bool(self.task_names)),
        ):
            given = [name for name in names if getattr(self, name) != usual[name]]
            if given and not is_there:
                warnings.warn(f"{', '.join(given)} was given, but has no effect without {other}", stacklevel=4)

    def _check_that_the_best_is_saved(self) -> None:
        """Refuse checkpoints that are written after updates without an evaluation, as transformers does."""
        every, saved = self.logging_steps if self.eval_steps is None else self.eval_steps, self.save_steps
        if not self.load_best_model_at_end or self.save_strategy != "steps":
            return
        times = saved / every
        if (every < 1) != (saved < 1) or abs(times - round(times)) > 1e-6 or times < 0.5:
            raise RequestError(
                f"load_best_model_at_end was asked for with an evaluation every {every:g} updates and save_steps="
                f"{saved:g}, but the best checkpoint is one that was evaluated when it was saved: make save_steps a "
                "multiple of eval_steps."
            )

    def _resolve(self) -> None:
        """Set what follows from other arguments, as transformers does, because callbacks read it."""
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            object.__setattr__(self, "metric_for_best_model", "loss")
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            object.__setattr__(self, "greater_is_better", not self.metric_for_best_model.endswith(LESS_IS_BETTER))

    def warmup(self, total_steps: int) -> int:
        """The updates over which the learning rate rises."""
        return steps_of(self.warmup_steps or self.warmup_ratio, total_steps, least=0)

    def step_settings(self, total_steps: int) -> StepSettings:
        """What the backend's runner is told, for a run of this many updates.

        Raises:
            RequestError: the schedule ends at a greater rate than learning_rate.
        """
        warmup, more = self.warmup(total_steps), self.lr_scheduler_kwargs or {}
        peak = USUAL_RATE if self.learning_rate is None else self.learning_rate
        schedule = schedule_settings(self.lr_scheduler_type, more, peak, warmup, total_steps)
        optimizer = OptimizerSettings(
            OPTIMIZERS[self.optim],
            peak,
            schedule,
            self.weight_decay,
            self.adam_beta1,
            self.adam_beta2,
            self.adam_epsilon,
            self.momentum,
            self.max_grad_norm or None,
        )
        return StepSettings(
            optimizer,
            LossSettings(self.label_smoothing_factor, self.z_loss, self.router_aux_loss_coef),
            self.gradient_accumulation_steps,
            self.zero_stage,
            {True: "bfloat16", False: "float32", None: "auto"}[self.bf16],
            self.recomputed,
            None if self.trainable is None else tuple(self.trainable),
            seed=self.seed,
            adapters=self.adapters,
            offload_optimizer=self.offload_optimizer,
            pipeline_schedule=self.pipeline_schedule,
        )

    def checkpoint_policy(self) -> CheckpointPolicy:
        """Which checkpoints stay: the best too, where metric_for_best_model says which that is."""
        best = self.best_metric if self.eval_strategy != "no" and self.metric_for_best_model is not None else None
        return CheckpointPolicy(self.save_total_limit, best, self.best_is_greatest)


def steps_of(value: float, total: int, *, least: int = 1) -> int:
    """A number of updates, or if it is below 1 a share of `total`, rounded up; at least `least`."""
    steps = value if value >= 1 else -(-value * total // 1)
    return max(least, int(steps))
