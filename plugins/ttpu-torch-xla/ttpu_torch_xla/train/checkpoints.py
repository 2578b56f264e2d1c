"""The checkpoints of a training run on torch_xla: a folder for each, with weights and optimizer state as safetensors,
and what the trainer gives as JSON. A folder has its name only when all its files are on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ttpu_core.errors import CheckpointError

if TYPE_CHECKING:
    from ttpu_torch_xla.train.runner import TorchXlaTrainRunner
    from ttpu_train.runner import CheckpointPolicy

logger = logging.getLogger(__name__)

FORMAT = "torch 1"
"""The kind and version of what a checkpoint holds."""
WEIGHTS, OPTIMIZER, RUN = "model.safetensors", "optimizer.safetensors", "run.json"
MODEL = "model"
"""The folder beside the checkpoints with the model's config and tokenizer."""
UNFINISHED = ".unfinished-"
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, TypeError)
"""What reading damaged files raises."""


def identity_of(model_type: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """What says whose checkpoint it is: the format, and the parameters."""
    table = {name: list(shape) for name, shape in shapes.items()}
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    return {"format": FORMAT, "model_type": model_type, "parameters": digest}


def read_run(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it is of another kind or version.
        OSError, ValueError, KeyError, TypeError: it is damaged: a file is missing, or not as long as it was.
    """
    if not (place / RUN).is_file():
        raise CheckpointError(
            f"the checkpoint {place} was to be read, but it has no {RUN}, so that another backend wrote it: use that "
            "backend."
        )
    run: dict[str, Any] = json.loads((place / RUN).read_text())
    if run["identity"]["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint {place} has format {run['identity']['format']!r}, but this version reads {FORMAT!r}: use "
            "the version that wrote it."
        )
    for name, size in run["files"].items():
        found = (place / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found:,} bytes of {size:,}")
    return run


def steps_in(folder: Path) -> tuple[int, ...]:
    """The steps of the checkpoints in a folder, in order."""
    names = (one.name for one in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(int(name) for name in names if name.isdigit()))


class TorchStore:
    """The checkpoints of one run in one folder; see `ttpu_train.runner.CheckpointStore`.

    Args:
        runner: whose state is saved and restored.
        folder: of the checkpoints; config and tokenizer are written beside it at the first save.
        policy: which checkpoints stay.
    """

    def __init__(self, runner: TorchXlaTrainRunner, folder: Path, policy: CheckpointPolicy) -> None:
        self._runner, self._folder, self._policy = runner, folder.resolve(), policy
        self._folder.mkdir(parents=True, exist_ok=True)
        for one in self._folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(one)
        self._thread: Thread | None = None
        self._failed: Exception | None = None

    def save(
        self, step: int, trainer: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        """Copy the runner's state to the host, and write it in the background unless `wait`.

        Args:
            step: updates so far.
            trainer: what JSON holds.
            metrics: of an evaluation, from which the best is chosen.
            wait: return when the checkpoint is committed.

        Raises:
            CheckpointError: an earlier save failed; earlier checkpoints are untouched.
        """
        self.wait()
        if step in self.steps():
            return
        runtime = self._runner.source.ttpu.runtime
        weights, state = self._runner.stored_tensors()
        whole = runtime.fetch([*weights.values(), *state.values()])
        files = {
            WEIGHTS: dict(zip(weights, whole, strict=False)),
            OPTIMIZER: dict(zip(state, whole[len(weights) :], strict=True)),
        }
        run = {
            "identity": self._identity(),
            "step": step,
            "trainer": dict(trainer),
            "metrics": dict(metrics or {}),
        }
        text = json.dumps(run)  # what JSON cannot hold fails here, and not in the background
        self._thread = Thread(target=self._write, args=(step, files, json.loads(text)))
        self._thread.start()
        if wait:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """The steps of all whole checkpoints, in order."""
        return steps_in(self._folder)

    def best_step(self) -> int | None:
        """The step with the best metric, or None."""
        values = {}
        for step in self.steps():
            try:
                metrics = json.loads((self._folder / str(step) / RUN).read_text())["metrics"]
            except DAMAGED:
                continue
            if self._policy.best_metric in metrics:
                value = float(metrics[self._policy.best_metric])
                values[step] = value if self._policy.greater_is_better else -value
        return max(values, key=lambda step: values[step]) if values else None

    def restore(self, step: int | None = None) -> Mapping[str, Any]:
        """Put a checkpoint into the runner, whatever mesh and ZeRO stage wrote it, and return what the trainer gave.

        Args:
            step: None takes the newest that is whole, with a warning for each newer one that is damaged.

        Raises:
            CheckpointError: none is there, it is damaged, or it is another model's.
        """
        self.wait()
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{'a checkpoint' if step is None else f'the checkpoint of step {step}'} was to be restored from "
                f"{self._folder}, but {f'it has those of {list(steps)}' if steps else 'it has none'}: use the folder "
                "and the step of a whole one."
            )
        for candidate in (step,) if step is not None else reversed(steps):
            place = self._folder / str(candidate)
            try:
                return self._restore(place)
            except DAMAGED as error:
                reason = _first_line(error)
                if step is not None or candidate == steps[0]:
                    raise CheckpointError(
                        f"the checkpoint {place} was to be restored, but its files are damaged ({reason}): delete it "
                        "and restore another."
                    ) from error
                logger.warning("the checkpoint %s is damaged (%s): the one before it is restored", place, reason)
        raise AssertionError("a loop over checkpoints ended without one")

    def wait(self) -> None:
        """Wait for saves in the background.

        Raises:
            CheckpointError: one failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._failed = self._failed, None
        if error is not None:
            raise CheckpointError(
                f"a checkpoint was to be written to {self._folder}, but that failed ({_first_line(error)}): make room "
                "or use another folder; earlier checkpoints are whole."
            ) from error

    def close(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed.
        """
        self.wait()

    def _write(self, step: int, files: Mapping[str, dict[str, torch.Tensor]], run: dict[str, Any]) -> None:
        place = self._folder / f"{UNFINISHED}{step}"
        try:
            self._keep_model()
            place.mkdir()
            for name, tensors in files.items():
                save_file(tensors, place / name)
            run["files"] = {name: (place / name).stat().st_size for name in files}
            (place / RUN).write_text(json.dumps(run))
            for file in place.iterdir():
                _to_disk(file)
            _to_disk(place)
            place.rename(self._folder / str(step))
            _to_disk(self._folder)
            self._remove_old()
        except Exception as error:  # whatever stopped a save, as a full disk
            shutil.rmtree(place, ignore_errors=True)
            self._failed = error

    def _remove_old(self) -> None:
        if self._policy.keep is None:
            return
        steps = self.steps()
        kept = {*steps[-self._policy.keep :], self.best_step() if self._policy.best_metric is not None else None}
        for step in steps:
            if step not in kept:
                place = self._folder / str(step)
                going = place.rename(self._folder / f"{UNFINISHED}{step}-old")
                shutil.rmtree(going)

    def _restore(self, place: Path) -> Mapping[str, Any]:
        run = read_run(place)
        identity = self._identity()
        if run["identity"] != identity:
            raise CheckpointError(
                f"the checkpoint {place} was to be restored, but it is of another {run['identity'].get('model_type')} "
                f"model, whose parameters are not those of this {identity['model_type']} model: use the folder of this "
                "model's run."
            )
        weights, state = load_file(place / WEIGHTS), load_file(place / OPTIMIZER)
        if state.keys() != self._runner.stored_tensors()[1].keys():
            raise CheckpointError(
                f"the checkpoint {place} was to be restored, but it holds the state of another optimizer or of other "
                "trained parameters: use the run's own optimizer and trainable patterns, or another folder."
            )
        self._runner.put(weights, state, int(run["step"]))
        trainer: Mapping[str, Any] = run["trainer"]
        return trainer

    def _identity(self) -> dict[str, Any]:
        weights, _ = self._runner.stored_tensors()
        shapes = {name: tuple(one.shape) for name, one in weights.items()}
        return identity_of(str(self._runner.source.config.model_type), shapes)

    def _keep_model(self) -> None:
        """Write config and tokenizer beside the checkpoints, once."""
        folder, model = self._folder.parent / MODEL, self._runner.source
        if (folder / "config.json").is_file():
            return
        staging = self._folder.parent / f".{MODEL}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        model.config.save_pretrained(staging)
        written = json.loads((staging / "config.json").read_text())
        (staging / "config.json").write_text(json.dumps(written | {"architectures": [type(model).__name__]}, indent=2))
        model.generation_config.save_pretrained(staging)
        if model.ttpu.tokenizer is not None:
            model.ttpu.tokenizer.save_pretrained(str(staging))
        folder.mkdir(exist_ok=True)
        for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(folder / file.name)
        staging.rmdir()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
