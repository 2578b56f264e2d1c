"""The interface between the trainer and the code that computes a model's updates: the `TrainRunner` protocol and the
values that cross it. The trainer reads data, counts steps, calls callbacks, and decides when to log, evaluate and save;
a runner holds weights, optimizer state and programs, and knows nothing of datasets. This module imports no framework.

Every process of a run has one runner and makes the same calls in the same order, because each call may start
collectives. A process gives the rows of its own devices: `Batch` holds `rows / processes` rows of each global batch.

Runners are structural: they need not inherit from anything here, nor import it at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from ttpu_train.adapters import AdapterSettings
from ttpu_train.objectives import Objective

ZeroStage = Literal[0, 1, 2, 3]
PipelineSchedule = Literal["gpipe", "1f1b"]
Values = TypeVar("Values", covariant=True)
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"]


# -- values that the trainer gives --


@dataclass(frozen=True)
class Batch:
    """This process's rows of one update.

    Attributes:
        tokens: int32 [rows, seq].
        weights: float32 [rows, seq], the weight of each token's own loss: of predicting `tokens[r, t]` from the tokens
            before it. 0 for padding, for prompts that are not trained on, and for the first token of a sequence.
        positions: int32 [rows, seq], from 0 in each sequence; negative for padding.
        segments: int32 [rows, seq], the number of the sequence that a token belongs to, from 1; 0 for padding. Tokens
            attend to their own sequence alone. None if each row holds one sequence.
        extra: name → float32 [rows, ...], of rows or of their tokens, what an objective reads beside them.
    """

    tokens: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate of each update, numbered from 0, as a share of the peak.

    Attributes:
        name: constant, linear, cosine, inverse_sqrt or warmup_stable_decay, each after a linear warm-up, with the
            formulas of `transformers.optimization`.
        warmup_steps: updates over which the rate rises from 0.
        total_steps: updates of the run.
        decay_steps: updates over which warmup_stable_decay falls at the end.
        min_ratio: the share that cosine and warmup_stable_decay end at.
    """

    name: ScheduleName = "linear"
    warmup_steps: int = 0
    total_steps: int = 1
    decay_steps: int = 0
    min_ratio: float = 0.0


@dataclass(frozen=True)
class OptimizerSettings:
    """How weights are updated.

    Attributes:
        name: adamw, adamw_8bit, adafactor, lion, muon or sgd.
        learning_rate: the peak of the schedule.
        schedule: of the learning rate.
        weight_decay: decoupled; of parameters whose path matches none of `no_decay`.
        beta1, beta2, epsilon: of Adam and its kin.
        momentum: of SGD and Muon.
        max_grad_norm: gradients are scaled down to this norm over all trained parameters; None clips nothing.
        no_decay: patterns (fnmatch) of parameter paths without weight decay: those that transformers spares.
    """

    name: str = "adamw"
    learning_rate: float = 5e-5
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.0
    max_grad_norm: float | None = 1.0
    no_decay: tuple[str, ...] = ("*bias", "*norm.scale")


@dataclass(frozen=True)
class LossSettings:
    """What is minimized: the cross-entropy of each token, as the mean by weight over the whole batch.

    Attributes:
        label_smoothing: the share of the target's probability that is spread evenly over the vocabulary.
        z_loss: coefficient of the mean squared log of the softmax's denominator (arXiv 2204.02311).
        router_aux_loss: coefficient of the experts' load balance (arXiv 2101.03961, equations 4 to 6); None takes
            the config's `router_aux_loss_coef` if its `output_router_logits` is true, else 0.
        tokens_at_once: tokens of each row whose logits exist at once.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    router_aux_loss: float | None = None
    tokens_at_once: int = 512


@dataclass(frozen=True)
class StepSettings:
    """All that a runner must know of a run.

    Attributes:
        optimizer: how weights are updated.
        loss: what is minimized.
        accumulation: parts that a batch is computed in, one after the other; the update is that of the whole batch.
        zero_stage: what is sharded over the axes that shard the batch: 1 the optimizer's state, 2 gradients too, 3
            weights too (arXiv 1910.02054); 0 nothing. None is 3 where the mesh has an axis fsdp or expert, else 0.
        compute_dtype: of activations and of the weights that they are multiplied with; masters are float32. "auto" is
            bfloat16 on accelerators and float32 on CPUs.
        remat: what is computed again in the backward pass: one of `ttpu_core.sharding.training_state.REMATS`, or "auto"
            (the least of them that fits).
        trainable: patterns (fnmatch) of the paths of trained parameters; None trains all.
        adapters: low-rank adapters that are trained in place of the model's parameters.
        offload_optimizer: the optimizer's state lies in the host's memory, and comes to the devices layer by layer.
        skip_nonfinite: an update whose gradients are not finite changes nothing.
        seed: of whatever is random in a step.
        objective: what is minimized in place of the cross-entropy of the next tokens; None for that. Its
            `rows_per_example` rows belong together: a batch holds a multiple of them for each device and part.
        pipeline_schedule: how parts pass the stages of a mesh with the axis "stage", where they are the microbatches:
            "gpipe" (all forward, then all backward) or "1f1b" (each backward as soon as it is through).
    """

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    accumulation: int = 1
    zero_stage: ZeroStage | None = None
    compute_dtype: str = "auto"
    remat: str = "full"
    trainable: tuple[str, ...] | None = None
    skip_nonfinite: bool = True
    seed: int = 42
    objective: Objective | None = None
    adapters: AdapterSettings | None = None
    offload_optimizer: bool = False
    pipeline_schedule: PipelineSchedule = "1f1b"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Which checkpoints of a run stay.

    Attributes:
        keep: how many stay, the newest ones; None keeps all.
        best_metric: the metric whose best checkpoint is among them; None for none. The newest and the best stay even if
            `keep` is 1.
        greater_is_better: whether a greater metric is better.
        last_saved_alone: only the checkpoint that was saved last stays, whatever its step.
    """

    keep: int | None = None
    best_metric: str | None = None
    greater_is_better: bool = False
    last_saved_alone: bool = False


# -- values that a runner gives, with whatever types of its own that have these --


@dataclass(frozen=True)
class RowLayout:
    """Which rows of a batch are this process's.

    Attributes:
        shards: the devices that rows are divided over: the rows of a global batch, divided by the accumulation, are a
            multiple of it.
        process_index: this process among those that train together.
        process_count: how many these are.
        device_count: devices of all processes in the mesh.
        share_index: which share of each batch's rows this process reads.
        share_count: how many shares there are, all of as many rows. Processes whose devices hold the same rows read the
            same one.
    """

    shards: int = 1
    process_index: int = 0
    process_count: int = 1
    device_count: int = 1
    share_index: int = 0
    share_count: int = 1


@dataclass(frozen=True)
class StepValues:
    """Figures of one update.

    Attributes:
        loss: the mean over the batch, before the update, with all that is minimized.
        cross_entropy: its part that is cross-entropy alone, in nats.
        tokens: the sum of the weights over all processes.
        grad_norm: of all trained parameters' gradients, before clipping.
        learning_rate: of this update.
        skipped: nothing was changed, because the gradients were not finite.
        metrics: means of the objective's own figures, by name, without those that no example of the batch has.
    """

    loss: float
    cross_entropy: float
    tokens: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalValues:
    """Sums over a batch of all processes: they add up over batches.

    Attributes:
        cross_entropy: in nats, summed by weight.
        tokens: the sum of the weights.
        correct: the weight of the tokens that were the likeliest.
        total: all that is minimized, and `divisor` what it is divided by.
        divisor: the weight of tokens, or the number of examples, as the objective says.
        metrics: name → the sum of a figure of the objective, and what that is divided by.
    """

    cross_entropy: float
    tokens: float
    correct: float
    total: float = 0.0
    divisor: float = 0.0
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class InFlight(Protocol[Values]):
    """A result that devices may still be computing."""

    def ready(self) -> bool:
        """Whether `values` returns without waiting."""
        ...

    def values(self) -> Values:
        """The figures, when they are there."""
        ...


class CheckpointFiles(Protocol):
    """Writes and reads the arrays of a runner's checkpoints; `ttpu_train.checkpoints.Checkpoints` does the rest.

    Attributes:
        backend: the name of the backend.
    """

    backend: str

    def identity(self) -> Mapping[str, Any]:
        """What says whose checkpoint it is, as JSON: of the model, its parameters, and the adapters if any."""
        ...

    def check(self, found: Mapping[str, Any], place: Path) -> None:
        """Compare the identity that a checkpoint has with the runner's.

        Raises:
            CheckpointError: the checkpoint is another model's or other adapters'.
        """
        ...

    def state_names(self) -> Iterable[str]:
        """The names of the optimizer's arrays."""
        ...

    def write(self, place: Path) -> Callable[[], None]:
        """Begin to write weights and optimizer state as they are now into a new folder. What is returned is called in
        another thread: it waits until the arrays of all processes are there, and raises what stopped them."""
        ...

    def read(self, place: Path, step: int) -> None:
        """Put the arrays of a checkpoint after update number `step` into the runner, all or none. Damaged files raise
        errors of any kind."""
        ...

    def write_model(self, folder: Path) -> None:
        """Write the model's config.json and tokenizer into an empty folder; only one process is asked."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


class TrainRunner(Protocol):
    """Weights and optimizer state on devices, and the programs that update them.

    Attributes:
        settings: of the run.
        step_count: updates so far.
        parameter_count: numbers in the model, padding not counted.
        trained_count: numbers in the trained parameters.
        layout: which rows of a batch are this process's.
        peak_flops: of one device in `settings.compute_dtype`, per second; None where unknown, as on a CPU.
    """

    settings: StepSettings
    step_count: int
    parameter_count: int
    trained_count: int
    layout: RowLayout
    peak_flops: float | None

    def step(self, batch: Batch) -> InFlight[StepValues]:
        """Update the weights. The first batch of a shape compiles its program.

        Raises:
            RequestError: rows that the layout's shards and the accumulation do not divide.
        """
        ...

    def evaluate(self, batch: Batch) -> InFlight[EvalValues]:
        """The loss of a batch with the weights as they are."""
        ...

    def predict(self, batch: Batch) -> tuple[InFlight[EvalValues], np.ndarray]:
        """What `evaluate` gives, and the logits, float32 [rows, seq, vocab], of this process's rows, of one pass
        through the model."""
        ...

    def any_process(self, flag: bool) -> bool:
        """Whether any process gives True; each must call it at the same place. With one process, `flag`."""
        ...

    def compiled_bytes(self) -> int | None:
        """The peak bytes of a device in the compiled update, or None before the first."""
        ...

    def checkpoint_files(self) -> CheckpointFiles:
        """What writes and reads the arrays of this run's checkpoints."""
        ...

    def save_pretrained(self, folder: Path, dtype: str) -> Path:
        """Write the weights as a Hugging Face checkpoint, in `dtype`; where adapters are trained, the adapter in
        peft's format."""
        ...

    def model(self) -> Any:
        """The loaded model with the weights as they are, to generate with; the next update takes them back."""
        ...


class TrainsWithRunner(Protocol):
    """A backend that the trainer drives: `ttpu_core.backend.Trains` with the types of this distribution."""

    name: str

    def row_layout(self, model: Any) -> RowLayout:
        """Which rows a loaded model's mesh gives this process."""
        ...

    def train_runner(self, model: Any, settings: StepSettings) -> TrainRunner:
        """A runner that takes over a loaded model's weights.

        Raises:
            RequestError: settings that contradict the model or each other.
            UnsupportedError: the backend cannot train this model so.
        """
        ...

    def export_checkpoint(
        self, place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
    ) -> None:
        """Write a run's checkpoint as a Hugging Face checkpoint, without devices of a slice. Of a run that trains
        adapters, write the adapter in peft's format, or with `merge` the base model with it merged.

        Args:
            place: the checkpoint's folder, in which `model` holds config and tokenizer.
            out: the folder to write.
            identity: whose checkpoint it is, as `CheckpointFiles.identity` said.
            dtype: of the written weights.
            merge: write the base model with the trained adapter merged, instead of the adapter.

        Raises:
            CheckpointError: its files are damaged, or are not those that its identity tells of.
            RequestError: `merge` for a run that trained the weights.
        """
        ...


class CompiledTraining(Protocol):
    """What the compiler of a slice says of a run's update.

    Attributes:
        topology: the slice.
        devices: of the slice.
        mesh: as text.
        rows: of one update, over all devices and parts.
        length: tokens of a row.
        peak_bytes: of a device.
        hbm_bytes: that a program may use on a device.
        held_bytes: master weights and optimizer state of a device.
        seconds: predicted for an update, with kernels, and with HBM's bandwidth shared.
        kernel_seconds: the least time of kernels that state their cost.
        dcn_seconds: what data takes between slices in an update, hidden or waited for, at an assumed rate.
        host_seconds: what copies to and from the host's memory take, hidden or waited for, at an assumed rate.
        peak_flops: of a device, per second, in bfloat16.
        compile_seconds: that compiling took.
    """

    topology: str
    devices: int
    mesh: str
    rows: int
    length: int
    peak_bytes: int
    hbm_bytes: int
    held_bytes: int
    seconds: float
    kernel_seconds: float
    dcn_seconds: float
    host_seconds: float
    peak_flops: float
    compile_seconds: float
