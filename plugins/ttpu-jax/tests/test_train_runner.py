"""The trainer's runner: its updates are torch's, whatever the mesh and the stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_jax.backend import JaxBackend
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.runner import Batch, OptimizerSettings, ScheduleSettings, StepSettings

ROWS, SEQ, STEPS = 16, 12, 10
SCHEDULE = ScheduleSettings("cosine", warmup_steps=3, total_steps=STEPS)
OPTIMIZER = OptimizerSettings(
    learning_rate=3e-3, schedule=SCHEDULE, weight_decay=0.1, max_grad_norm=0.5, no_decay=("*.scale",)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner") / "llama"
    return llama_checkpoint(folder, num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)


def batch(seed: int) -> Batch:
    """Rows of different lengths, padded."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 255, (ROWS, SEQ)).astype(np.int32)
    lengths = random.integers(4, SEQ + 1, ROWS)
    places = np.arange(SEQ)[None]
    real = places < lengths[:, None]
    return Batch(tokens, (real & (places > 0)).astype(np.float32), np.where(real, places, -1).astype(np.int32))


def runner(checkpoint: Path, mesh: str | None = None, **settings: Any) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32", mesh=mesh)
    return JaxBackend().train_runner(model, StepSettings(**({"optimizer": OPTIMIZER} | settings)))


def trained(one: JaxTrainRunner, first: int, last: int) -> list[list[float]]:
    figures = [one.step(batch(number)) for number in range(first, last)]
    return [[f.loss, f.tokens, f.grad_norm, f.learning_rate] for f in (each.values() for each in figures)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> tuple[list[list[float]], dict[str, np.ndarray]]:
    one = runner(checkpoint)
    figures = trained(one, 0, STEPS)
    return figures, {path: np.asarray(value) for path, value in one.model().params.items()}


def test_updates_are_those_of_torch(checkpoint: Path, plain: Any) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    decayed = [value for name, value in model.named_parameters() if "norm" not in name]
    others = [value for name, value in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    found = []
    for number in range(STEPS):
        rows = batch(number)
        tokens, weights = torch.tensor(rows.tokens).long(), torch.tensor(rows.weights)
        logits = model(tokens, attention_mask=torch.tensor(rows.positions >= 0).long()).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append([loss.item(), weights.sum().item(), norm.item(), schedule.get_last_lr()[0]])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(plain[0], found, rtol=1e-5)
