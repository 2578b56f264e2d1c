"""Stages of layers: updates are those of one device by both schedules, and checkpoints those of any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU, Trainer
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.params.placement import local_placement
from ttpu_jax.runner.build import refuse_idle_devices
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.adapters import AdapterSettings
from ttpu_train.objectives import Distill
from ttpu_train.runner import Batch, LossSettings, OptimizerSettings, StepSettings

ROWS, SEQ = 16, 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "llama"
    return llama_checkpoint(folder, num_hidden_layers=4, tie_word_embeddings=True)


def batch(seed: int) -> Batch:
    """Rows of two sequences each, and weights that differ."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 255, (ROWS, SEQ)).astype(np.int32)
    weights = (random.random((ROWS, SEQ)) > 0.2).astype(np.float32)
    weights[:, [0, 6]] = 0
    segments = np.tile(np.repeat([1, 2], [6, SEQ - 6]), (ROWS, 1)).astype(np.int32)
    positions = np.tile(np.concatenate([np.arange(6), np.arange(SEQ - 6)]), (ROWS, 1)).astype(np.int32)
    return Batch(tokens, weights, positions, segments)


def runner(checkpoint: Path, mesh: str | None = None, **settings: Any) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32", mesh=mesh, purpose="train")
    optimizer = OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.5)
    return JaxBackend().train_runner(model, StepSettings(**({"optimizer": optimizer} | settings)))


def figures(one: JaxTrainRunner) -> list[float]:
    updates = [one.step(batch(seed)).values() for seed in range(3)]
    held_out = one.evaluate(batch(9)).values()
    return [*(value for each in updates for value in (each.loss, each.grad_norm)), held_out.total / held_out.divisor]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[float]:
    return figures(runner(checkpoint))


@pytest.mark.parametrize(
    ("mesh", "parts", "settings"),
    [
        ("stage=2,fsdp=2,tensor=2", 4, {"pipeline_schedule": "gpipe"}),
        ("stage=4,data=2", 8, {"zero_stage": 2, "remat": "none"}),  # by 1F1B, more microbatches than inputs are kept
    ],
)
def test_stages_train_as_one_device(
    checkpoint: Path, plain: list[float], mesh: str, parts: int, settings: dict[str, Any]
) -> None:
    one = runner(checkpoint, mesh, accumulation=parts, **settings)
    np.testing.assert_allclose(figures(one), plain, rtol=1e-5)
    layers = next(value for path, value in one.params.items() if path.startswith("groups."))
    assert layers.sharding.shard_shape(layers.shape)[0] * one._zero.weights.mesh.shape["stage"] == 4


def test_1f1b_keeps_the_activations_of_fewer_microbatches(checkpoint: Path) -> None:
    peaks = []
    for schedule in ("gpipe", "1f1b"):
        one = runner(checkpoint, "stage=2", accumulation=16, pipeline_schedule=schedule)
        one.step(batch(0))
        peaks.append(one.compiled_bytes())
    assert peaks[1] < peaks[0]


def test_a_run_in_stages_goes_on_without_them(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": row.tolist()} for row in np.random.default_rng(0).integers(0, 255, (32, 8))]

    def train(folder: str, mesh: str | None, rows_at_once: int, parts: int, **more: Any) -> list[float]:
        trainer = Trainer(
            str(checkpoint),
            train_dataset=rows,
            output_dir=tmp_path / folder,
            parallelism_strategy=mesh,
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=parts,
            load_options={"dtype": "float32"},
            max_steps=3,
            save_steps=2,
            max_length=8,
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer.train(**more)
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    whole = train("whole", "stage=2", 4, 2)
    rest = train("rest", None, 8, 1, resume_from_checkpoint=tmp_path / "whole" / "checkpoints" / "2")
    assert rest[-1] == pytest.approx(whole[-1], rel=1e-5) and rest[-1] != pytest.approx(whole[0], rel=1e-3)


def test_what_stages_cannot_do_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"stage=2 was asked for, but only training passes rows through stages"):
        AutoModelForTPU.from_pretrained(str(checkpoint), mesh="stage=2")
    with pytest.raises(UnsupportedError, match=r"stage=8 .* 4 repeated units of 1 layers: .* are 2, 4"):
        runner(checkpoint, "stage=8")
    with pytest.raises(UnsupportedError, match=r"stage=2 was asked for with adapters"):
        runner(checkpoint, "stage=2", adapters=AdapterSettings(("q_proj",)))
    with pytest.raises(UnsupportedError, match=r"pipeline_schedule='1f1b' was asked for with router_aux_loss=0\.1"):
        runner(checkpoint, "stage=2", loss=LossSettings(router_aux_loss=0.1))
    with pytest.raises(UnsupportedError, match=r"stage=2 was asked for with method='distill'"):
        runner(checkpoint, "stage=2", objective=Distill())
    with pytest.raises(UnsupportedError, match=r"serve over stage=2, but it does not shard layers over stage"):
        refuse_idle_devices(local_placement("stage=2"))
    with pytest.raises(RequestError, match="pipeline_schedule='interleaved'"):
        Trainer(str(checkpoint), output_dir=tmp_path, pipeline_schedule="interleaved")
