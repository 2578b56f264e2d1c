"""A complete `TrainRunner` in numpy: a table of bigrams, trained by gradient descent. The trainer's own tests run on
it, and it shows what a runner must do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.errors import CheckpointError
from ttpu_train.runner import Batch, CheckpointPolicy, EvalValues, RowLayout, StepSettings, StepValues


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
        loss, tokens, _, correct = self._loss(batch)
        return Done(EvalValues(loss, tokens, correct))

    def logits(self, batch: Batch) -> np.ndarray:
        return self.loaded.table[batch.tokens].astype(np.float32)

    def any_process(self, flag: bool) -> bool:
        return flag

    def compiled_bytes(self) -> int | None:
        return None

    def checkpoints(self, folder: Path, policy: CheckpointPolicy) -> NumpyStore:
        return NumpyStore(self, folder, policy)

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


class NumpyStore:
    """Checkpoints as folders of two files each, renamed into place."""

    def __init__(self, runner: NumpyTrainRunner, folder: Path, policy: CheckpointPolicy) -> None:
        self.runner, self.folder, self.policy = runner, folder, policy
        folder.mkdir(parents=True, exist_ok=True)

    def save(
        self, step: int, trainer: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        unfinished = self.folder / f".{step}"
        unfinished.mkdir()
        state = {"trainer": trainer, "metrics": metrics, "step_count": self.runner.step_count}
        (unfinished / "state.json").write_text(json.dumps(state))
        np.save(unfinished / "table.npy", self.runner.loaded.table)
        unfinished.rename(self.folder / str(step))
        kept = self.policy.keep
        for old in self.steps()[:-kept] if kept else ():
            if old != self.best_step():
                shutil.rmtree(self.folder / str(old))

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(int(one.name) for one in self.folder.iterdir() if one.name.isdigit()))

    def best_step(self) -> int | None:
        metric = self.policy.best_metric
        found = {step: (self._state(step)["metrics"] or {}).get(metric) for step in self.steps()}
        known = {step: value for step, value in found.items() if value is not None}
        best = max if self.policy.greater_is_better else min
        return best(known, key=lambda step: known[step]) if known else None

    def restore(self, step: int | None = None) -> Mapping[str, Any]:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"a checkpoint was to be restored, but {self.folder} has none: train first.")
        step = steps[-1] if step is None else step
        self.runner.loaded.table = np.load(self.folder / str(step) / "table.npy")
        state = self._state(step)
        self.runner.step_count = state["step_count"]
        return dict(state["trainer"])

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _state(self, step: int) -> dict[str, Any]:
        return dict(json.loads((self.folder / str(step) / "state.json").read_text()))


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

    def export_checkpoint(self, folder: Path, out: Path, *, step: int | None, dtype: str, merge: bool = False) -> int:
        raise NotImplementedError
