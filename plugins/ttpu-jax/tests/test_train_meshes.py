"""`ttpu.Trainer` on meshes of experts, of the sequence and of two slices, and in two processes: its losses are those of
one device. `benchmarks/training_layouts.py` walks through all meshes and stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from devices import xla_flags
from jax.experimental import multihost_utils
from strategies import checkpoint
from torchless import torchless

from ttpu import Trainer
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.strategy import TRAINING_STRATEGY
from ttpu_core.spec import Parameter, axes
from ttpu_jax.params.placement import local_placement
from ttpu_jax.train.export import Parameters
from ttpu_jax.train.rows import row_layout
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_jax.train.zero import zero_placements

ROWS, LENGTH, UPDATES = 8, 8, 3
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
MODELS = {
    "llama": {"model_type": "llama", **SIZES, **HEADS},
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        **HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    },
}
MODELS["mixtral of two layers"] = {
    **MODELS["mixtral"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, and examples of different lengths."""
    folder, random = tmp_path_factory.mktemp("meshes"), np.random.default_rng(0)
    for name, config in MODELS.items():
        checkpoint(folder / name, config)
    rows = [{"input_ids": random.integers(0, 61, 3 + number % 6).tolist()} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(place: Path, model: str, mesh: str | None, rows_over: int, **more: Any) -> dict[str, Any]:
    """Those of a run whose rows are divided over so many devices."""
    parts = more.get("gradient_accumulation_steps", 1)
    return {
        "model": str(place / model),
        "train_dataset": str(place / "rows.jsonl"),
        "cache_dir": str(place / "tokens"),
        "parallelism_strategy": mesh,
        "per_device_train_batch_size": ROWS // (rows_over * parts),
        "max_steps": UPDATES,
        "max_length": LENGTH,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "remat": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(place / "run"),
        **more,
    }


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def plain(place: Path) -> dict[str, list[float]]:
    """The losses of one device."""
    found = {}
    for model in MODELS:
        one = Trainer(**arguments(place, model, None, 1))
        one.train()
        found[model] = losses(one)
    return found


@pytest.mark.parametrize(
    ("model", "mesh", "rows_over", "stage", "parts"),
    [
        ("mixtral", "fsdp=2,expert=2,tensor=2", 4, 2, 1),
        ("mixtral", "expert=4,tensor=2", 4, 3, 1),
        ("mixtral of two layers", "fsdp=2,expert=4", 8, 3, 1),
        ("llama", "dcn.data=2,fsdp=2,sequence=2", 4, 3, 2),
    ],
)
def test_losses_are_those_of_one_device(
    place: Path, plain: dict[str, list[float]], model: str, mesh: str, rows_over: int, stage: int, parts: int
) -> None:
    given = arguments(place, model, mesh, rows_over, zero_stage=stage, gradient_accumulation_steps=parts)
    one = Trainer(**given)
    one.train()
    np.testing.assert_allclose(losses(one), plain[model], rtol=1e-5)


def test_two_processes_that_hold_the_same_rows_train_as_one_device_and_it_restores_the_bits_of_their_checkpoint(
    place: Path, plain: dict[str, list[float]], tmp_path: Path
) -> None:
    begun = arguments(place, "llama", "sequence=2,tensor=4", 1, output_dir=str(tmp_path / "run"))
    begun |= {"save_strategy": "steps", "save_steps": UPDATES}
    (tmp_path / "run.json").write_text(json.dumps(begun))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TTPU_")}
    two = ["launch", "--nproc-per-node", "2", "--devices-per-process", "4", "--", "ttpu", "train", "run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", *two],
        env=torchless(kept) | {"XLA_FLAGS": xla_flags()}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    watch = Restored(tmp_path / "run" / "checkpoints" / str(UPDATES))
    alone = arguments(place, "llama", None, 1, output_dir=str(tmp_path / "run"), callbacks=[watch])
    one = Trainer(**alone, resume_from_checkpoint=True)
    with pytest.warns(UserWarning, match="nothing is left to do"):
        one.train()
    assert watch.compared
    np.testing.assert_allclose(losses(one), plain["llama"], rtol=1e-5)


class Restored:
    """Compares what a run begins with with a checkpoint, bit for bit."""

    def __init__(self, saved: Path) -> None:
        self.saved, self.compared = saved, False

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        with Parameters(self.saved) as saved:
            for path, value in model.stored_arrays()[0].items():
                np.testing.assert_array_equal(np.asarray(value), saved.read(path), err_msg=path)
            self.compared = True


class Device:
    """One device of a process."""

    def __init__(self, process: int) -> None:
        self.process_index = process


def placement(rows: dict[int, list[int]]) -> Any:
    """Process → the rows that its devices hold, one for each device, as a placement on a mesh."""
    devices = {Device(process): (slice(row, row + 1),) for process, own in rows.items() for row in own}
    mesh = SimpleNamespace(shape={"data": len({row for own in rows.values() for row in own})}, size=len(devices))
    sharding = SimpleNamespace(devices_indices_map=lambda _: devices)
    return SimpleNamespace(mesh=mesh, axes_of=lambda _: ("data",), sharding=lambda *_: sharding)


def test_processes_that_hold_the_same_rows_read_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    shared = placement({0: [2, 3], 1: [0, 1], 2: [2, 3], 3: [1, 0]})
    layouts = []
    for process in range(4):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        layouts.append(row_layout(shared))
    assert [(one.process_index, one.share_index, one.share_count) for one in layouts] == [
        (0, 1, 2), (1, 0, 2), (2, 1, 2), (3, 0, 2),
    ]  # fmt: skip
    every = np.array([[[process, row] for row in range(3)] for process in range(4)])
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: every)
    runner: Any = SimpleNamespace(layout=layouts[3])
    gathered = JaxTrainRunner.gathered_rows(runner, every[3])
    assert gathered.tolist() == [*every[1].tolist(), *every[0].tolist()]  # each share once, in the order of rows
    for refused in ({0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [3, 0]}, {0: [0], 1: [0], 2: [1]}):
        with pytest.raises(UnsupportedError, match="a part of each other's rows or none"):
            row_layout(placement(refused))


@pytest.mark.parametrize(
    ("mesh", "stage"), [("expert=4,tensor=2", 3), ("fsdp=2,expert=4", 3), ("data=8", 0), ("tensor=8", 0)]
)
def test_weights_are_shared_by_default_where_fsdp_or_expert_divides_rows(mesh: str, stage: int) -> None:
    found = zero_placements(local_placement(mesh, TRAINING_STRATEGY), None)
    assert found.stage == stage
    kernel = Parameter((8, 16, 32), (axes.EXPERT, axes.MLP, axes.EMBED))
    if "expert" in mesh:  # which divides experts alone where it divides them, and in every stage
        for which in (found, zero_placements(local_placement(mesh, TRAINING_STRATEGY), 1)):
            sharding: Any = which.state("layers.0.moe.experts.up.kernel", kernel)
            assert _names(sharding.spec[0])[0] == "expert"


@pytest.mark.parametrize(("stage", "weight"), [(1, ()), (2, ()), (3, ("data",))])
def test_what_devices_hold_of_experts_are_whole_experts(stage: int, weight: tuple[str, ...]) -> None:
    found = zero_placements(local_placement("data=4,tensor=2", TRAINING_STRATEGY), stage)
    kernel = Parameter((8, 2, 16, 32), (axes.EXPERT, axes.GATE_UP, axes.MLP, axes.EMBED))
    held, moments = (which("layers.0.moe.experts.gate_up.kernel", kernel).spec for which in (found.weight, found.state))
    assert (_names(held[0]), _names(moments[0])) == (weight, ("data",))
    assert held[2] == moments[2] == "tensor" and _names(held[3]) == _names(moments[3]) == ()


def test_where_experts_are_divided_already_their_rows_are() -> None:
    found = zero_placements(local_placement("data=2,expert=4", TRAINING_STRATEGY), 1)
    sharding: Any = found.state("experts.up.kernel", Parameter((4, 64, 32), (axes.EXPERT, axes.MLP, axes.EMBED)))
    assert [_names(by) for by in sharding.spec] == [("expert",), ("data",), ()]


def _names(by: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if by is None else (by,) if isinstance(by, str) else by
