"""A run of the trainer's runner on one device and, as a part of xla_spmd.py, on eight simulated ones; and transformers'
own Trainer and peft there."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import llama_checkpoint
from transformers import Trainer, TrainingArguments

from ttpu import AutoModelForTPU
from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.train.runner import TorchXlaTrainRunner
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.runner import Batch, CheckpointPolicy, OptimizerSettings, ScheduleSettings, StepSettings

ROWS, SEQ, STEPS = 16, 12, 10
OPTIMIZER = OptimizerSettings(
    learning_rate=3e-3,
    schedule=ScheduleSettings("cosine", warmup_steps=3, total_steps=STEPS),
    weight_decay=0.1,
    max_grad_norm=0.5,
)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything sharded": ("data=2,fsdp=2,tensor=2", {}),
    "parts": ("fsdp=8", {"accumulation": 2, "zero_stage": 3}),
    "optimizer state": ("data=8", {"zero_stage": 1}),
    "gradients": ("data=8", {"zero_stage": 2, "accumulation": 2, "remat": "none"}),
}
MOMENT = "exp_avg.model.layers.0.mlp.up_proj.weight"


def checkpoint_at(folder: Path, **config: Any) -> Path:
    """A llama whose heads eight devices divide."""
    return llama_checkpoint(folder, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=1, **config)


def batch(seed: int, rows: int = ROWS) -> Batch:
    """Rows of different lengths, padded."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 255, (rows, SEQ)).astype(np.int32)
    lengths = random.integers(4, SEQ + 1, rows)
    places = np.arange(SEQ)[None]
    real = places < lengths[:, None]
    return Batch(tokens, (real & (places > 0)).astype(np.float32), np.where(real, places, -1).astype(np.int32))


def runner(checkpoint: Path, mesh: str | None = None, **settings: Any) -> TorchXlaTrainRunner:
    model = AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", dtype="float32", mesh=mesh)
    return TorchXlaTrainRunner(model, StepSettings(**({"optimizer": OPTIMIZER} | settings)))


def trained(one: TorchXlaTrainRunner, first: int, last: int) -> list[list[float]]:
    figures = [one.step(batch(number)) for number in range(first, last)]
    return [[f.loss, f.tokens, f.grad_norm, f.learning_rate] for f in (each.values() for each in figures)]


def stored(one: TorchXlaTrainRunner) -> dict[str, torch.Tensor]:
    """All weights and the optimizer's state, on the host."""
    tensors = {name: tensor for each in one.stored_tensors() for name, tensor in each.items()}
    return dict(zip(tensors, current().fetch(list(tensors.values())), strict=True))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(one, theirs[name]) for name, one in ours.items())


def layout_case(checkpoint: Path, mesh: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Three updates, and how many programs they were."""
    runtime, one = current(), runner(checkpoint, mesh, **settings)
    runtime.sync(wait=True)
    runtime.reset_counters()
    figures = trained(one, 0, 3)
    parameters, state = one.stored_tensors()
    return {
        "figures": figures,
        "compiles": runtime.counters().compiles,
        "weight": runtime.sharding_of(parameters[MOMENT.partition(".")[2]]),
        "state": runtime.sharding_of(state[MOMENT]),
        "compiles_of_saving": compiles_of_saving(one),
    }


def compiles_of_saving(one: TorchXlaTrainRunner) -> int:
    current().reset_counters()
    with tempfile.TemporaryDirectory() as folder:
        one.save_pretrained(Path(folder), "float32")
    return current().counters().compiles


def moved_to_another_mesh(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """What is saved on one mesh, restored on another with another stage of ZeRO."""
    first = runner(checkpoint, "fsdp=4,tensor=2")
    trained(first, 0, 1)
    Checkpoints(first, folder, CheckpointPolicy()).save(1, {"position": 1}, wait=True)
    second = runner(checkpoint, "data=8", zero_stage=1)
    answer = Checkpoints(second, folder, CheckpointPolicy()).restore()
    return {"answer": answer, "same": same(stored(second), stored(first)), "next": trained(second, 1, 2)}


def rows_of_text() -> list[dict[str, torch.Tensor]]:
    """Eight examples, one batch of transformers' Trainer."""
    ids = torch.randint(0, 255, (8, SEQ), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one.clone(), "attention_mask": torch.ones_like(one)} for one in ids]


def stock_trainer(model: Any, folder: Path, data: Any, **arguments: Any) -> Trainer:
    """transformers' Trainer with its own defaults, but for what the test is short of: five updates, a log."""
    given = {"max_steps": 5, "logging_steps": 1, "learning_rate": 1e-3, "report_to": "none", "disable_tqdm": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(model, TrainingArguments(output_dir=str(folder), **(given | arguments)), train_dataset=data)


def losses_of(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class Broken(list[Any]):
    """A dataset whose third example cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            raise ValueError("the third example is damaged")
        return super().__getitem__(index)


def stock_cases(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """transformers' Trainer with default arguments on eight devices, and what it refuses."""
    runtime = current()
    model = AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", dtype="float32", mesh="fsdp=8")
    trainer = stock_trainer(model, folder / "run", rows_of_text())
    runtime.sync(wait=True)
    runtime.reset_counters()
    steps = trainer.train().global_step
    compiles = runtime.counters().compiles
    trainer.save_model(str(folder / "saved"))
    result: dict[str, Any] = {
        "steps": steps,
        "losses": losses_of(trainer),
        "compiles": compiles,
        "compiles_of_saving": runtime.counters().compiles - compiles,
        "written": sorted(one.name for one in (folder / "run" / "checkpoint-5").iterdir()),
    }
    wrapped = {"xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    for name, data, arguments in (
        ("broken", Broken(rows_of_text()), {}),
        ("wrapped", rows_of_text(), {"fsdp": True, "fsdp_config": wrapped}),
    ):
        try:
            stock_trainer(model, folder / name, data, save_strategy="no", **arguments).train()
        except (ValueError, UnsupportedError) as error:
            result[name] = str(error)
    return result


def cases() -> dict[str, Any]:
    """Every case of eight devices."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        checkpoint = checkpoint_at(folder / "model")
        return {
            "layouts": {name: layout_case(checkpoint, *given) for name, given in LAYOUTS.items()},
            "moved": moved_to_another_mesh(checkpoint, folder / "checkpoints"),
            "stock": stock_cases(checkpoint, folder),
        }
