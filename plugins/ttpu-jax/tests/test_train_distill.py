"""Distillation: the divergence is TRL's, whatever the mesh and the accumulation, and a student comes nearer to its
teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import llama_checkpoint
from transformers import AutoTokenizer

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.train.objectives.distill import divergence
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.distillation import DistillMethod
from ttpu_train.objectives import Distill
from ttpu_train.runner import Batch, LossSettings, OptimizerSettings, ScheduleSettings, StepSettings
from ttpu_train.trainer import Trainer

ROWS, SEQ, STEPS = 8, 10, 2
OPTIMIZER = OptimizerSettings("sgd", 0.5, ScheduleSettings("constant"), max_grad_norm=None)
OBJECTIVE = Distill(0.3, 1.7, 0.25)
PYDOC = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and a wider teacher with other weights."""
    folder = tmp_path_factory.mktemp("distill")
    llama_checkpoint(folder / "student", num_hidden_layers=1)
    llama_checkpoint(folder / "teacher", seed=3, hidden_size=48, num_attention_heads=6)
    return folder


def batch() -> Batch:
    random = np.random.default_rng(7)
    places, lengths = np.arange(SEQ)[None], random.integers(5, SEQ + 1, ROWS)
    real = places < lengths[:, None]
    tokens = np.where(real, random.integers(1, 255, (ROWS, SEQ)), 0).astype(np.int32)
    return Batch(tokens, (real & (places >= 2)).astype(np.float32), np.where(real, places, -1).astype(np.int32))


def runner(folder: Path, mesh: str | None = None, objective: Distill = OBJECTIVE, **settings: Any) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(folder / "student"), dtype="float32", mesh=mesh)
    loss = LossSettings(tokens_at_once=4)
    one = JaxBackend().train_runner(model, StepSettings(OPTIMIZER, loss, objective=objective, **settings))
    one.teach(folder / "teacher", {}, None)
    return one


def figures(one: JaxTrainRunner) -> list[dict[str, float]]:
    values = [one.step(batch()).values() for _ in range(STEPS)]
    return [{"loss": one.loss, "grad_norm": one.grad_norm, "ce": one.cross_entropy, **one.metrics} for one in values]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, float]]:
    return figures(runner(folder))


@pytest.mark.torch
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_are_those_of_trl(beta: float) -> None:
    import torch
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    random = np.random.default_rng(3)
    student, teacher = (random.normal(0, 2, size=(2, 5, 64)).astype(np.float32) for _ in range(2))
    labels = np.where(random.random((2, 5)) < 0.3, -100, 1)

    def trl(values: Any) -> Any:
        return GKDTrainer.generalized_jsd_loss(
            values, torch.tensor(teacher), torch.tensor(labels), beta=beta, temperature=1.7
        )

    def mean(values: Any) -> Any:
        apart = divergence(values / 1.7, teacher / 1.7, beta)
        return (apart * (labels != -100)).sum() / (labels != -100).sum()

    given = torch.tensor(student, requires_grad=True)
    expected = trl(given)
    expected.backward()
    loss, gradient = jax.value_and_grad(mean)(student)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-4)
    assert given.grad is not None
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.torch
def test_updates_are_those_of_trl(folder: Path, plain: Any) -> None:
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("student", "teacher")
    )
    optimizer, given = torch.optim.SGD(student.parameters(), 0.5), batch()
    tokens, mask = torch.tensor(given.tokens).long(), torch.tensor(given.positions >= 0).long()
    labels = tokens.masked_fill(torch.tensor(given.weights == 0), -100)
    with torch.no_grad():
        taught = teacher(tokens, attention_mask=mask).logits
    for ours in plain:
        logits = student(tokens, attention_mask=mask).logits
        apart = GKDTrainer.generalized_jsd_loss(logits[:, :-1], taught[:, :-1], labels[:, 1:], 0.3, 1.7)
        cross = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = 0.75 * apart + 0.25 * cross
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((value.grad**2).sum() for value in student.parameters()))
        optimizer.step()
        expected = {"loss": loss, "grad_norm": norm, "ce": cross, "cross_entropy": cross, "divergence": apart}
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value.item(), rtol=1e-4, err_msg=name)


def test_updates_do_not_depend_on_mesh_stage_and_accumulation(folder: Path, plain: Any) -> None:
    """The axis `tensor` pads the vocabulary of 259 tokens, and stage 3 divides the teacher's weights by `data` too."""
    one = runner(folder, "data=2,tensor=2", zero_stage=3, accumulation=2)
    assert one._teacher is not None
    kernel = one._teacher.params["groups.0.0.mlp.down.kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    assert one._teacher.params["embed.embedding"].shape[0] == 260
    for ours, expected in zip(figures(one), plain, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_only_the_student_is_trained_and_saved(folder: Path, plain: Any) -> None:
    one = runner(folder)
    assert one._teacher is not None
    before = {path: np.asarray(value) for path, value in one._teacher.params.items()}
    figures(one)
    for path, value in before.items():
        np.testing.assert_array_equal(value, one._teacher.params[path], err_msg=path)
    assert one.stored_names == frozenset(one.params) and one.params["embed.embedding"].shape == (259, 32)


def test_other_vocabularies_and_places_are_refused(folder: Path, tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "teacher", vocab_size=300, num_hidden_layers=1)
    llama_checkpoint(tmp_path / "student", num_hidden_layers=1)
    with pytest.raises(RequestError, match=r"teacher teacher has a vocabulary of 300 tokens and the student student"):
        runner(tmp_path)
    one = runner(folder)
    with pytest.raises(RequestError, match=r"has mesh, but the teacher lies on the devices of the student"):
        one.teach(folder / "teacher", {"mesh": "fsdp"}, None)

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"other": 1}

    with pytest.raises(RequestError, match=r"as many tokens but not the same ones"):
        one.teach(folder / "teacher", {}, Other())
    model = AutoModelForTPU.from_pretrained(str(folder / "student"), dtype="float32")
    alone = JaxBackend().train_runner(model, StepSettings(OPTIMIZER, objective=OBJECTIVE))
    with pytest.raises(RequestError, match=r"there is no teacher: call teach\(\) first"):
        alone.step(batch())
    for given, words in (
        ({}, "teacher_model='None'"),
        ({"teacher_model": "a", "beta": 2.0}, "beta=2.0 .*from 0"),
        ({"teacher_model": "a", "temperature": 0.0}, "temperature=0.0 .*above 0"),
        ({"teacher_model": "a", "cross_entropy_weight": 1.5}, "cross_entropy_weight=1.5 .*from 0 to 1"),
    ):
        with pytest.raises(RequestError, match=words):
            DistillMethod.read(given)
    with pytest.raises(UnsupportedError, match="lmbda above 0"):
        DistillMethod.read({"teacher_model": "a", "lmbda": 0.5})


def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    """The teacher is read in 8 bits."""
    tokenizer = AutoTokenizer.from_pretrained(PYDOC)
    folder = llama_checkpoint(tmp_path / "student", vocab_size=len(tokenizer), num_hidden_layers=1)
    teacher = llama_checkpoint(tmp_path / "teacher", vocab_size=len(tokenizer), num_hidden_layers=1, seed=3)
    for each in (folder, teacher):
        tokenizer.save_pretrained(each)
    texts = [{"text": text} for text in ("def f(a): return a", "class A: pass", "import os", "for x in y: print(x)")]
    trainer = Trainer(
        str(folder), method="distill", teacher_model=teacher, teacher_load_options={"quantization": "w8a16"}, beta=0.0,
        train_dataset=texts, eval_dataset=texts, output_dir=tmp_path / "run", cache_dir=tmp_path, max_length=16,
        packing=True, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=12, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_divergence"] < 0.5 * before["eval_divergence"] and after["eval_loss"] == after["eval_divergence"]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(lines[0]["divergence"]) and lines[0]["cross_entropy"] > 0
