"""`Engine`: a run that the user's own loop drives, call for call as DeepSpeed's engine: forward, backward, step. An
update's loss and gradients are one compiled program, so that forward and backward only collect micro-batches, and the
step at a boundary of accumulation computes them all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.micro_batches import MicroLoss, batch_of, joined
from ttpu_train.runner import Batch, CheckpointPolicy, InFlight, StepValues
from ttpu_train.trainer import Trainer

LATEST = "latest"
"""The file that names the newest checkpoint, as DeepSpeed's."""
UNMAPPED = {
    "parameters": "weights are held by the backend: engine.module is the model with the weights as they are",
    "named_parameters": "weights are held by the backend: engine.module is the model with the weights as they are",
    "no_sync": "gradients are summed over devices in the compiled update: leave it out",
    "allreduce_gradients": "gradients are summed over devices in the compiled update: leave it out",
    "train_batch": "there are no pipeline stages: call the engine, backward and step",
    "eval_batch": "there are no pipeline stages: call engine.eval(), then the engine",
    "set_train_batch_size": "the update is compiled for one accumulation: write it in the configuration",
}
"""Members of DeepSpeed's engine that a compiled update cannot have, and what to do."""


class EngineOptimizer:
    """What DeepSpeed's loops read of an optimizer. Gradients exist only within an update.

    Args:
        engine: whose optimizer it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group with the settings of the run; `lr` is that of the last update."""
        settings = self._engine.runner.settings.optimizer
        group = {"lr": self._engine.get_lr()[0], "weight_decay": settings.weight_decay, "eps": settings.epsilon}
        return [{**group, "betas": (settings.beta1, settings.beta2)}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of an update end with it."""

    def step(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "optimizer.step() was called, but the optimizer is part of the engine's compiled update: call "
            "engine.step() alone."
        )


class EngineSchedule:
    """What DeepSpeed's loops read of a schedule. The learning rate follows the number of the update.

    Args:
        engine: whose learning rate it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last update; before the first, the peak."""
        return self._engine.get_lr()

    def step(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "lr_scheduler.step() was called, but the schedule is part of the engine's compiled update: call "
            "engine.step() alone."
        )


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
    """

    device = "cpu"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._layout, self.runner = trainer, trainer.layout, trainer.runner
        self.training = True
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._skipped = 0
        self._counted = True
        self._forward: tuple[MicroLoss, Batch] | None = None
        self._collected: list[tuple[MicroLoss, Batch]] = []
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
            RequestError: the micro-batch is none, or its rows differ in number from those of the update's others.
        """
        rows = batch if isinstance(batch, Batch) else batch_of({**(batch or {}), **inputs})
        if self._collected and len(rows.tokens) != len(self._collected[0][1].tokens):
            raise RequestError(
                f"a micro-batch of {len(rows.tokens)} rows was given after one of "
                f"{len(self._collected[0][1].tokens)} in the same update, but a compiled update has equal parts: give "
                "micro-batches of one size."
            )
        loss = MicroLoss(self.runner, rows)
        if self.training:
            self._forward = loss, rows
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
        self._count_skipped()
        self._update, self._counted = self.runner.step(joined(batches)), False
        for loss in losses:
            loss.updated(self._update)
        self.global_steps += 1
        self.global_samples += sum(len(one.tokens) for one in batches) * self._layout.process_count

    def train(self, mode: bool = True) -> Engine:
        """Collect micro-batches for updates from now on."""
        self.training = mode
        return self

    def eval(self) -> Engine:
        """Only compute losses from now on."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Gradients of an update end with it."""

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
        self._count_skipped()
        return self._skipped

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
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write weights, optimizer state and counters to `save_dir/tag`, and return when they are there.

        Args:
            save_dir: the folder of all tags.
            tag: of this checkpoint; None is global_stepN.
            client_state: what `load_checkpoint` returns, as JSON.
            save_latest: name the tag in the file `latest`.

        Raises:
            RequestError: some micro-batches of an update are collected.
            CheckpointError: it cannot be written.
        """
        if self._collected or self._forward is not None:
            raise RequestError(
                f"a checkpoint was to be written after {len(self._collected)} of {self.gradient_accumulation_steps()} "
                "micro-batches of an update, but these have not been computed: save after a step that "
                "is_gradient_accumulation_boundary() announced."
            )
        name = tag or f"global_step{self.global_steps}"
        store = Checkpoints(self.runner, Path(save_dir).expanduser() / name, CheckpointPolicy(keep=1))
        counters = {"global_steps": self.global_steps, "micro_steps": self.micro_steps,
                    "global_samples": self.global_samples, "skipped_steps": self.skipped_steps}  # fmt: skip
        try:
            store.save(self.global_steps, {"engine": counters, "client_state": dict(client_state or {})}, wait=True)
        finally:
            store.close()
        if save_latest and self._layout.process_index == 0:
            (Path(save_dir).expanduser() / LATEST).write_text(name, encoding="utf-8")
        return True

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Restore a checkpoint that any mesh and ZeRO stage wrote; return its folder and its `client_state`.

        Args:
            load_dir: the folder of all tags.
            tag: None takes the one that the file `latest` names; without that file nothing is restored, with a
                warning, and the folder that is returned is None.

        Raises:
            RequestError: there is no such tag.
            CheckpointError: the checkpoint is damaged, or another model's.
        """
        folder = Path(load_dir).expanduser()
        if tag is None and not (folder / LATEST).is_file():
            warnings.warn(f"{folder} has no file {LATEST!r}, so that no checkpoint is restored", stacklevel=2)
            return None, {}
        place = folder / (tag or (folder / LATEST).read_text(encoding="utf-8").strip())
        if not place.is_dir():
            raise RequestError(
                f"the checkpoint {place.name!r} was to be loaded from {folder}, but it is not there: name one of "
                f"{', '.join(sorted(one.name for one in folder.iterdir() if one.is_dir())) or 'none'}."
            )
        store = Checkpoints(self.runner, place, CheckpointPolicy(keep=1))
        try:
            saved = store.restore()
        finally:
            store.close()
        counters = dict(saved["engine"])
        self._skipped, self._counted, self._update = counters.pop("skipped_steps"), True, None
        for name, value in counters.items():
            setattr(self, name, value)
        self._forward, self._collected, self._was_backward = None, [], False
        return str(place), dict(saved["client_state"])

    def save_16bit_model(self, save_dir: str | Path) -> bool:
        """Write the weights in bfloat16 as a Hugging Face checkpoint."""
        self.runner.save_pretrained(Path(save_dir).expanduser(), "bfloat16")
        return True

    def _count_skipped(self) -> None:
        if not self._counted and self._update is not None:
            self._skipped += self._update.values().skipped
            self._counted = True
