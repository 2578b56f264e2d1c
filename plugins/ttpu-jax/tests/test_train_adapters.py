"""Low-rank adapters train as peft's do, whatever the mesh, beside dense and quantized weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.adapters import AdapterSettings
from ttpu_train.runner import Batch, CheckpointPolicy, OptimizerSettings, ScheduleSettings, StepSettings

ROWS, SEQ, STEPS = 8, 12, 10
OPTIMIZER = OptimizerSettings(
    learning_rate=3e-3, schedule=ScheduleSettings("constant", total_steps=STEPS), weight_decay=0.1, max_grad_norm=0.5
)
LORA = AdapterSettings(("q_proj", "v_proj", "down_proj"), r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False)
DORA = AdapterSettings("all-linear", r=2, use_dora=True, layers_to_transform=(1,), bias="none")
KINDS = {"lora": LORA, "dora": DORA}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "llama"
    return llama_checkpoint(folder, num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)


@cache
def batch(seed: int) -> Batch:
    random = np.random.default_rng(seed)
    places = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (ROWS, SEQ))
    tokens = random.integers(0, 255, (ROWS, SEQ)).astype(np.int32)
    return Batch(tokens, (places > 0).astype(np.float32), places)


def runner(checkpoint: Path, adapters: AdapterSettings | None, mesh: str | None = None, **given: Any) -> JaxTrainRunner:
    load = {"dtype": "float32", **{name: given.pop(name) for name in ("quantization",) if name in given}}
    model = AutoModelForTPU.from_pretrained(str(checkpoint), mesh=mesh, **load)
    settings = StepSettings(**({"optimizer": OPTIMIZER} | given), adapters=adapters)
    return JaxBackend().train_runner(model, settings)


def trained(one: JaxTrainRunner, first: int, last: int) -> list[list[float]]:
    figures = [one.step(batch(number)) for number in range(first, last)]
    return [[f.loss, f.grad_norm] for f in (each.values() for each in figures)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[float]], Path]]:
    """Of each kind, the figures on one device, and the folder with the adapter before and after."""
    found = {}
    for name, settings in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        one = runner(checkpoint, settings)
        one.save_pretrained(folder / "before", "float32")
        figures = trained(one, 0, STEPS)
        one.save_pretrained(folder / "after", "float32")
        np.save(folder / "logits.npy", one.logits(batch(0)))
        found[name] = figures, folder
    return found


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_peft(checkpoint: Path, plain: Any, kind: str) -> None:
    import peft
    import torch
    import transformers

    figures, folder = plain[kind]
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "before", is_trainable=True)
    weights = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=OPTIMIZER.learning_rate, weight_decay=0.1)
    found = []
    for number in range(STEPS):
        tokens = torch.tensor(batch(number).tokens).long()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        found.append([loss.item(), torch.nn.utils.clip_grad_norm_(weights, 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(figures, found, rtol=1e-4)
    own = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(own, folder / "after")
    with torch.no_grad():
        logits = read(torch.tensor(batch(0).tokens).long()).logits.numpy()
    np.testing.assert_allclose(np.load(folder / "logits.npy"), logits, atol=2e-5)
