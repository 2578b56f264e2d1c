"""A complete `TrainRunner` in numpy: a table of bigrams, trained by gradient descent. The trainer's own tests run on
it, and it shows what a runner must do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.errors import CheckpointError
from ttpu_train.runner import Batch, EvalValues, RowLayout, StepSettings, StepValues


@dataclass
class Done:
    """A result that is there at once."""

    result: Any

    def ready(self) -> bool:
        return True

    def values(self) -> Any:
        return self.result


class BigramModel:
    """What a backend opens: `table` [vocab, vocab] holds the logits of the next token."""

    backend = "numpy"

    def __init__(self, vocab: int, tokenizer: Any = None) -> None:
        self.table, self.tokenizer = np.zeros((vocab, vocab)), tokenizer


class NumpyTrainRunner:
    """Gradient descent on a `BigramModel`. `break_at` names updates whose gradients are not finite, and `spike_at`
    those batches, counted from 1, whose loss is a hundred times too large."""

    peak_flops = 1e9

    def __init__(self, model: BigramModel, settings: StepSettings, layout: RowLayout | None = None) -> None:
        self.loaded, self.settings, self.layout = model, settings, layout or RowLayout()
        self.step_count = 0
        self.parameter_count = self.trained_count = model.table.size
        self.break_at: set[int] = set()
        self.spike_at: set[int] = set()
        self.rows: list[np.ndarray] = []
        """The tokens of each batch, in order."""
        self.evaluated = self.predicted = 0
        """Batches whose figures, and whose logits, were computed."""

    def step(self, batch: Batch) -> Done:
        self.rows.append(batch.tokens.copy())
        self.step_count += 1
        loss, tokens, gradient, _ = self._loss(batch)
        optimizer = self.settings.optimizer
        rate = optimizer.learning_rate * (1 - (self.step_count - 1) / optimizer.schedule.total_steps)
        if self.step_count in self.break_at:
            return Done(StepValues(float("nan"), float("nan"), tokens, float("nan"), rate, skipped=True))
        self.loaded.table -= rate * gradient / max(tokens, 1)
        mean = loss / max(tokens, 1) * (100 if len(self.rows) in self.spike_at else 1)
        return Done(StepValues(mean, mean, tokens, float(np.linalg.norm(gradient)), rate))

    def evaluate(self, batch: Batch) -> Done:
        self.evaluated += 1
        loss, tokens, _, correct = self._loss(batch)
        return Done(EvalValues(loss, tokens, correct))

    def predict(self, batch: Batch) -> tuple[Done, np.ndarray]:
        self.predicted += 1
        return self.evaluate(batch), self.loaded.table[batch.tokens].astype(np.float32)

    def any_process(self, flag: bool) -> bool:
        return flag

    def compiled_bytes(self) -> int | None:
        return None

    def checkpoint_files(self) -> NumpyFiles:
        return NumpyFiles(self)

    def save_pretrained(self, folder: Path, dtype: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "table.npy", self.loaded.table.astype(dtype))
        return folder

    def model(self) -> BigramModel:
        return self.loaded

    def _loss(self, batch: Batch) -> tuple[float, float, np.ndarray, float]:
        """Summed loss, weights, gradient and weight of correct tokens."""
        before, target, weights = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.weights[:, 1:].astype(np.float64)
        logits = self.loaded.table[before]
        logits = logits - logits.max(-1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        chosen = np.take_along_axis(probabilities, target[..., None], -1)[..., 0]
        loss = float(-(weights * np.log(chosen)).sum())
        correct = float((weights * (logits.argmax(-1) == target)).sum())
        probabilities[(*np.indices(target.shape), target)] -= 1
        gradient = np.zeros_like(self.loaded.table)
        np.add.at(gradient, before, weights[..., None] * probabilities)
        return loss, float(weights.sum()), gradient, correct


class NumpyFiles:
    """The arrays of checkpoints: one file."""

    backend = "numpy"

    def __init__(self, runner: NumpyTrainRunner) -> None:
        self.runner = runner

    def identity(self) -> dict[str, Any]:
        return {"vocab": len(self.runner.loaded.table)}

    def check(self, found: Mapping[str, Any], place: Path) -> None:
        if found != self.identity():
            raise CheckpointError(f"the checkpoint {place} was to be read, but it is of another model: use its own.")

    def state_names(self) -> list[str]:
        return [self.runner.settings.optimizer.name]

    def write(self, place: Path) -> Callable[[], None]:
        table = self.runner.loaded.table.copy()

        def finish() -> None:
            place.mkdir()
            np.save(place / "table.npy", table)

        return finish

    def read(self, place: Path, step: int) -> None:
        self.runner.loaded.table, self.runner.step_count = np.load(place / "table.npy"), step

    def write_model(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.identity()))

    def close(self) -> None:
        pass


class NumpyBackend:
    """A backend that trains bigram tables and does nothing else."""

    name = "numpy"

    def __init__(self) -> None:
        self.runners: list[NumpyTrainRunner] = []

    def row_layout(self, model: BigramModel) -> RowLayout:
        return RowLayout()

    def train_runner(self, model: BigramModel, settings: StepSettings) -> NumpyTrainRunner:
        self.runners.append(NumpyTrainRunner(model, settings))
        return self.runners[-1]

    def export_checkpoint(
        self, place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
    ) -> None:
        np.save(out / "table.npy", np.load(place / "table.npy").astype(dtype))
        (out / "config.json").write_bytes((place / "model" / "config.json").read_bytes())
