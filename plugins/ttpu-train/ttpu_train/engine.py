"""`Engine`: a run that the user's own loop drives, call for call as DeepSpeed's engine: forward, backward, step. An
update's loss and gradients are one compiled program, so that forward and backward only collect micro-batches, and the
step at a boundary of accumulation computes them all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.files import write_whole
from ttpu_train.arguments import steps_of
from ttpu_train.checkpoints import Checkpoints, steps_in
from ttpu_train.engine_tags import LATEST, refuse_others, tag_name, tags_in
from ttpu_train.engine_views import EngineOptimizer, EngineSchedule
from ttpu_train.foreign import kind_of
from ttpu_train.inputs import described
from ttpu_train.micro_batches import MicroBatches, MicroLoss, batch_of, joined
from ttpu_train.progress import Progress
from ttpu_train.row_shapes import RowShapes
from ttpu_train.runner import Batch, CheckpointPolicy, EvalValues, InFlight, StepValues
from ttpu_train.trainer import Trainer

UNMAPPED = {
    "parameters": "weights are held by the backend: engine.module is the model with the weights as they are",
    "named_parameters": "weights are held by the backend: engine.module is the model with the weights as they are",
    "state_dict": "weights are held by the backend: engine.module.save_pretrained(folder) writes them",
    "save_pretrained": "engine.module has it, and engine.save_16bit_model writes bfloat16",
    "to": "weights are on the mesh's devices already: leave it out",
    "cuda": "weights are on the mesh's devices already: leave it out",
    "local_rank": "the backend chooses devices: engine.global_rank is the number of the process",
    "set_lr": "the schedule is part of the compiled update: write it in the configuration",
    "clip_grad_norm_": "gradients are clipped in the compiled update: write gradient_clipping in the configuration",
    "loss_scale": "bfloat16 needs no scale: leave it out",
    "cur_scale": "bfloat16 needs no scale: leave it out",
    "monitor": "trackers are opened by the configuration, or by report_to: leave it out",
    "no_sync": "gradients are summed over devices in the compiled update: leave it out",
    "allreduce_gradients": "gradients are summed over devices in the compiled update: leave it out",
    "train_batch": "there are no pipeline stages: call the engine, backward and step",
    "eval_batch": "there are no pipeline stages: call engine.eval(), then the engine",
    "set_train_batch_size": "the update is compiled for one accumulation: write it in the configuration",
}
"""Members of DeepSpeed's engine that a compiled update cannot have, and what to do."""


class Engine:
    """A run that the user's loop drives; `ttpu.initialize` makes it.

    Args:
        trainer: with the model and the arguments of the run.

    Attributes:
        runner: computes updates.
        training: whether calls collect micro-batches; `train` and `eval` set it.
        global_steps: updates so far.
        micro_steps: micro-batches so far.
        global_samples: rows so far, over all devices.
        skipped_steps: updates that changed nothing, because gradients were not finite.
        device: where batches are given: "cpu", that is, as numpy arrays, lists or tensors of the host.
        optimizer: what loops read of an optimizer.
        lr_scheduler: what loops read of a schedule.
        training_dataloader: the micro-batches of the training data, or None.
    """

    device = "cpu"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._layout, self.runner = trainer, trainer.layout, trainer.runner
        self.optimizer, self.lr_scheduler = EngineOptimizer(self), EngineSchedule(self)
        self.training_dataloader: MicroBatches | None = None
        spec = getattr(getattr(described(trainer.loaded), "architecture", None), "spec", None)
        self._vocabulary: int | None = getattr(spec, "vocab_size", None)
        self.training = True
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._progress = Progress(trainer, self.steps_per_print())
        self._skipped_before = 0
        self._is_told_of_end = False
        self._shapes, self._eval_shapes = RowShapes(self.runner), RowShapes(self.runner)
        self._forward: tuple[MicroLoss, Batch] | None = None
        self._collected: list[tuple[MicroLoss, Batch]] = []
        self._has_own_rows = False
        self._was_backward = False
        self._update: InFlight[StepValues] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in UNMAPPED:
            raise UnsupportedError(f"engine.{name} was asked for, but {UNMAPPED[name]}.")
        raise AttributeError(f"the engine has no attribute {name!r}: see docs/training.md for those it has.")

    # -- the loop --

    def __call__(self, batch: Batch | Mapping[str, Any] | None = None, **inputs: Any) -> MicroLoss:
        """The loss of a micro-batch.

        Args:
            batch: of the engine's loader, or a mapping with input_ids [rows, seq] and, if there are any, labels,
                attention_mask and position_ids of the same shape, as transformers' models take them; labels are the
                input_ids, or -100 where a token is not trained on.
            **inputs: the same by name.

        Raises:
            RequestError: the micro-batch is none, or its rows differ in number from those of the update's others, or of
                other processes.
        """
        is_own = not isinstance(batch, Batch)
        if isinstance(batch, Batch):
            rows = batch
        else:
            if batch is not None and not isinstance(batch, Mapping):
                inputs["input_ids"], batch = batch, None  # a model's first argument
            rows = batch_of({**(batch or {}), **inputs}, self._vocabulary)
            self._check_rows(rows)
        if self._collected and len(rows.tokens) != len(self._collected[0][1].tokens):
            raise RequestError(
                f"a micro-batch of {len(rows.tokens)} rows was given after one of "
                f"{len(self._collected[0][1].tokens)} in the same update, but a compiled update has equal parts: give "
                "micro-batches of one size."
            )
        loss = MicroLoss(self._evaluated if is_own else self.runner.evaluate, rows)
        if self.training:
            self._forward, self._has_own_rows = (loss, rows), self._has_own_rows or is_own
        return loss

    forward = __call__

    def backward(self, loss: MicroLoss) -> MicroLoss:
        """Add the micro-batch to the update.

        Args:
            loss: what the engine's last call returned.

        Raises:
            RequestError: it is anything else.
        """
        if self._forward is None or loss is not self._forward[0]:
            raise RequestError(
                f"backward() was given a {type(loss).__name__} that is not what the engine's last call in training "
                "returned, but the compiled update computes the gradients of that loss alone: pass it itself, after "
                "engine.train(); a coefficient or another loss cannot be mapped."
            )
        self._collected.append(self._forward)
        self._forward, self._was_backward = None, True
        return loss

    def step(self) -> None:
        """Count the micro-batch; at a boundary of accumulation, update the weights.

        Raises:
            RequestError: no backward came before, or rows that the devices do not divide.
        """
        if not self._was_backward:
            raise RequestError("engine.step() was called without a backward() before it: call backward(loss) first.")
        boundary = self.is_gradient_accumulation_boundary()
        self._was_backward = False
        self.micro_steps += 1
        if not boundary:
            return
        losses, batches = zip(*self._collected, strict=True)
        self._collected = []
        self._tell_of_end()
        self._progress.begin(self.global_steps)
        batch = joined(batches)
        self._update = self.runner.step(self._shapes.padded(batch) if self._has_own_rows else batch)
        self._has_own_rows = False
        for loss in losses:
            loss.updated(self._update)
        self._progress.given(self._update)
        self.global_steps += 1
        self.global_samples += sum(len(one.tokens) for one in batches) * self._layout.share_count

    def train(self, mode: bool = True) -> Engine:
        """Collect micro-batches for updates from now on."""
        self.training = mode
        return self

    def eval(self) -> Engine:
        """Only compute losses from now on."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Gradients of an update end with it."""

    def destroy(self) -> None:
        """Wait for the devices, and close trackers and a trace."""
        self._progress.end()

    # -- where it is --

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self.runner.settings.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch on a device, of the devices that rows are divided over."""
        return self._trainer.args.per_device_train_batch_size

    def train_batch_size(self) -> int:
        """Rows of an update over all devices."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self._layout.shards

    def steps_per_print(self) -> int:
        """Updates between two lines of the log."""
        return steps_of(self._trainer.args.logging_steps, self.runner.settings.optimizer.schedule.total_steps)

    def gradient_clipping(self) -> float:
        """The norm that gradients are scaled down to; 0 scales none."""
        return self.runner.settings.optimizer.max_grad_norm or 0.0

    def bfloat16_enabled(self) -> bool | None:
        """Whether updates compute in bfloat16; None where that follows from the devices."""
        return self._trainer.args.bf16

    def fp16_enabled(self) -> bool:
        """False: float16 is refused."""
        return False

    def zero_optimization_stage(self) -> int | None:
        """The stage of ZeRO; None leaves it to the mesh."""
        return self.runner.settings.zero_stage

    def get_lr(self) -> list[float]:
        """The learning rate of the last update; before the first, the peak."""
        update = self._update
        return [self.runner.settings.optimizer.learning_rate if update is None else update.values().learning_rate]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before clipping; None before the first."""
        return None if self._update is None else self._update.values().grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last update changed the weights: its gradients were finite."""
        return self._update is not None and not self._update.values().skipped

    @property
    def skipped_steps(self) -> int:
        """Updates that changed nothing, because gradients were not finite."""
        self._progress.drain()
        return self._skipped_before + self._progress.skipped

    @property
    def global_rank(self) -> int:
        """This process among those that train together."""
        return self._layout.process_index

    @property
    def world_size(self) -> int:
        """Devices that rows are divided over."""
        return self._layout.shards

    @property
    def module(self) -> Any:
        """The model with the weights as they are, to generate with."""
        return self._trainer.model

    # -- checkpoints --

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        **others: Any,
    ) -> bool:
        """Write weights, optimizer state and counters to `save_dir/tag`, and return when they are there. What the tag
        held before stays until then, and is deleted afterwards.

        Args:
            save_dir: the folder of all tags.
            tag: of this checkpoint; None is global_stepN.
            client_state: what `load_checkpoint` returns, as JSON.
            save_latest: name the tag in the file `latest`.
            **others: further arguments of DeepSpeed, each None or False.

        Raises:
            RequestError: some micro-batches of an update are collected, or the tag is no name of a folder.
            UnsupportedError: an argument of DeepSpeed that means nothing here.
            CheckpointError: it cannot be written.
        """
        refuse_others("save_checkpoint", others)
        if self._collected or self._forward is not None:
            raise RequestError(
                f"a checkpoint was to be written after {len(self._collected)} of {self.gradient_accumulation_steps()} "
                "micro-batches of an update, but these have not been computed: save after a step that "
                "is_gradient_accumulation_boundary() announced."
            )
        name = tag_name(f"global_step{self.global_steps}" if tag is None else tag)
        folder = Path(save_dir).expanduser()
        counters = {"global_steps": self.global_steps, "micro_steps": self.micro_steps,
                    "global_samples": self.global_samples, "skipped_steps": self.skipped_steps}  # fmt: skip
        store = Checkpoints(self.runner, folder / name, CheckpointPolicy(keep=1, last_saved_alone=True))
        kept = {"engine": counters, "client_state": dict(client_state or {})}
        try:
            store.save(self.runner.step_count, kept, wait=True)
        finally:
            store.close()
        if save_latest and self._layout.process_index == 0:
            write_whole(folder / LATEST, name)
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None, **others: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Restore a checkpoint that any mesh and ZeRO stage wrote; return its folder and its `client_state`.

        Args:
            load_dir: the folder of all tags.
            tag: None takes the one that the file `latest` names; without that file nothing is restored, with a
                warning, and the folder that is returned is None.
            **others: further arguments of DeepSpeed, with its defaults.

        Raises:
            RequestError: there is no such tag.
            UnsupportedError: an argument of DeepSpeed that means nothing here.
            CheckpointError: the checkpoint is damaged, another model's or another program's.
        """
        refuse_others("load_checkpoint", others)
        folder = Path(load_dir).expanduser()
        if tag is None and not (folder / LATEST).is_file():
            warnings.warn(f"{folder} has no file {LATEST!r}, so that no checkpoint is restored", stacklevel=2)
            return None, {}
        place = folder / tag_name((folder / LATEST).read_text(encoding="utf-8").strip() if tag is None else tag)
        if not place.is_dir():
            raise RequestError(
                f"the checkpoint {place.name!r} was to be loaded from {folder}, but it is not there: "
                f"{f'name one of {tags}' if (tags := ', '.join(tags_in(folder))) else 'the folder has none'}."
            )
        kind = kind_of(place)
        if kind is not None and not steps_in(place):
            raise RequestError(
                f"the checkpoint {place} was to be loaded, but it is {kind}: name a tag that engine.save_checkpoint "
                "wrote, or begin with the weights, as a Hugging Face checkpoint given as `model`."
            )
        store = Checkpoints(self.runner, place, CheckpointPolicy(keep=1))
        try:
            saved = store.restore()
        finally:
            store.close()
        counters = dict(saved["engine"])
        self._progress.drain()
        self._skipped_before, self._update = counters.pop("skipped_steps") - self._progress.skipped, None
        for name, value in counters.items():
            setattr(self, name, value)
        self._forward, self._collected, self._was_backward = None, [], False
        return str(place), dict(saved["client_state"])

    def save_16bit_model(self, save_dir: str | Path) -> bool:
        """Write the weights in bfloat16 as a Hugging Face checkpoint.

        Raises:
            CheckpointError: the folder cannot be written to, as on a full disk.
        """
        self._trainer.save_model(Path(save_dir).expanduser())
        return True

    def _evaluated(self, batch: Batch) -> InFlight[EvalValues]:
        return self.runner.evaluate(self._eval_shapes.padded(batch))

    def _check_rows(self, batch: Batch) -> None:
        """Refuse rows of the user's own loader that other processes cannot have as many of."""
        processes = self._layout.process_count
        expected = self.train_micro_batch_size_per_gpu() * self._layout.shards // self._layout.share_count
        if processes > 1 and len(batch.tokens) != expected:
            raise RequestError(
                f"a micro-batch of {len(batch.tokens)} rows was given, but each of {processes} processes gives "
                f"{expected}, which is train_micro_batch_size_per_gpu times its share of the devices: make the "
                "loader's batch_size so, with drop_last=True."
            )

    def _tell_of_end(self) -> None:
        schedule = self.runner.settings.optimizer.schedule
        ends = schedule.name in ("linear", "cosine", "warmup_stable_decay")
        if ends and self.global_steps >= schedule.total_steps and not self._is_told_of_end:
            self._is_told_of_end = True
            warnings.warn(
                f"update {self.global_steps + 1:,} begins, but the learning rate's schedule ended after "
                f"{schedule.total_steps:,}: write a larger total_num_steps in the scheduler's params, or end the loop",
                stacklevel=3,
            )
