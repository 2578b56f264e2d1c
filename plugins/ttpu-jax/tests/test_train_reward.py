"""Reward models: the loss and its figures are TRL's, checkpoints are transformers' classifiers, runs go on bit for bit,
and GRPO asks a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint
from transformers import AutoTokenizer

from ttpu import AutoModelForTPU
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_core.spec.training_flops import training_flops
from ttpu_jax.backend import JaxBackend
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.reward_model import JaxRewardModel, classifier_of
from ttpu_jax.train.objectives.reward import SCORE
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.export import export_run
from ttpu_train.grpo.reward_models import RewardModel
from ttpu_train.objectives import Reward
from ttpu_train.runner import Batch, CheckpointPolicy, OptimizerSettings, ScheduleSettings, StepSettings
from ttpu_train.trainer import Trainer

ROWS, SEQ, PAD = 16, 10, 258
OPTIMIZER = OptimizerSettings("adamw", 1e-2, ScheduleSettings("constant"), weight_decay=0.1)
OBJECTIVE = Reward(0.1, PAD)
PYDOC = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose head is not its embedding."""
    return llama_checkpoint(tmp_path_factory.mktemp("reward") / "llama", tie_word_embeddings=False)


def opened(folder: Path, mesh: Any = None) -> JaxRewardModel:
    return JaxBackend().open_reward_model(folder, JaxLoadOptions(dtype="float32", mesh=mesh))


def runner(folder: Path, mesh: str | None = None, objective: Reward = OBJECTIVE, **settings: Any) -> JaxTrainRunner:
    return JaxBackend().train_runner(opened(folder, mesh), StepSettings(OPTIMIZER, objective=objective, **settings))


def batch(*, margins: bool = True) -> Batch:
    """Texts of different lengths, some of which end by the token that pads; the last pair only fills the batch."""
    random = np.random.default_rng(7)
    places, lengths = np.arange(SEQ)[None], random.integers(3, SEQ + 1, ROWS)
    lengths[-2:] = 0
    real = places < lengths[:, None]
    tokens = np.where(real, random.integers(1, 255, (ROWS, SEQ)), PAD).astype(np.int32)
    tokens[0, lengths[0] - 1] = tokens[3, lengths[3] - 1] = PAD
    extra = {"margins": random.normal(size=ROWS).astype(np.float32)} if margins else {}
    positions = np.where(real, places, -1).astype(np.int32)
    return Batch(tokens, (positions > 0).astype(np.float32), positions, None, extra)


def figures(one: JaxTrainRunner, steps: int = 3) -> list[dict[str, float]]:
    values = [one.step(batch()).values() for _ in range(steps)]
    return [{"loss": one.loss, "grad_norm": one.grad_norm, "tokens": one.tokens, **one.metrics} for one in values]


def of_trl(folder: Path, given: Batch, center: float | None) -> tuple[float, float, dict[str, float], np.ndarray]:
    """Loss, norm of the gradients, metrics and rewards of TRL's own trainer on a saved reward model."""
    from collections import defaultdict
    from types import SimpleNamespace

    import torch
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.reward_trainer import RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1 and model.config.pad_token_id == PAD
    turned = np.r_[0 : ROWS - 2 : 2, 1 : ROWS - 2 : 2]  # chosen first, then rejected, without what fills the batch
    inputs = {"input_ids": torch.tensor(given.tokens[turned]).long()}
    inputs["attention_mask"] = torch.tensor(given.positions[turned] >= 0).long()
    if "margins" in given.extra:
        inputs["margin"] = torch.tensor(given.extra["margins"][: ROWS - 2 : 2])
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    args = SimpleNamespace(center_rewards_coefficient=center)
    trainer: Any = SimpleNamespace(
        model=model.train(), args=args, accelerator=same, _total_train_tokens=0, _tp_size=1,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    loss, outputs = RewardTrainer.compute_loss(trainer, model, inputs, return_outputs=True)
    loss.backward()
    norm = torch.sqrt(sum((value.grad**2).sum() for value in model.parameters()))
    rewards = np.empty(ROWS - 2, np.float32)
    rewards[turned] = outputs.logits[:, 0].detach().numpy()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), norm.item(), metrics, rewards


@pytest.mark.torch
@pytest.mark.parametrize(("margins", "center"), [(True, 0.1), (False, None)])
def test_updates_and_checkpoints_are_those_of_trl(
    margins: bool, center: float | None, checkpoint: Path, tmp_path: Path
) -> None:
    one, given = runner(checkpoint, objective=Reward(center, PAD)), batch(margins=margins)
    for step in range(2):
        folder = one.save_pretrained(tmp_path / str(step), "float32")
        values = one.step(given).values()
        loss, norm, metrics, _ = of_trl(folder, given, center)
        np.testing.assert_allclose([values.loss, values.grad_norm], [loss, norm], rtol=1e-4)
        for name in ("accuracy", "margin", "mean_reward"):
            np.testing.assert_allclose(values.metrics[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.torch
def test_the_rewards_of_a_checkpoint_are_those_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    one, given = runner(checkpoint), batch()
    figures(one, 1)
    folder = one.save_pretrained(tmp_path / "reward", "float32")
    theirs = of_trl(folder, given, None)[3]
    rows = [row[places >= 0].tolist() for row, places in zip(given.tokens, given.positions, strict=True)][:-2]
    np.testing.assert_allclose(opened(folder).rewards(rows), theirs, rtol=1e-4, atol=1e-5)
    model: Any = one.model()
    np.testing.assert_allclose(model.rewards(rows), theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="has no language model head"):
        model.generate("a")


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[dict[str, float]]:
    return figures(runner(checkpoint))


def test_updates_do_not_depend_on_mesh_stage_and_accumulation(checkpoint: Path, plain: Any) -> None:
    one = runner(checkpoint, "data=2,tensor=2", accumulation=2, zero_stage=2)
    for ours, expected in zip(figures(one), plain, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_run_goes_on_bit_for_bit_and_is_exported(checkpoint: Path, plain: Any, tmp_path: Path) -> None:
    one = runner(checkpoint)
    figures(one, 1)
    store = Checkpoints(one, tmp_path / "run" / "checkpoints", CheckpointPolicy())
    store.save(1, {"position": 1})
    store.close()
    again = runner(checkpoint)
    Checkpoints(again, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()
    assert SCORE in again.stored_names and not any(path.startswith("head.kernel") for path in again.params)
    assert figures(again, 2) == plain[1:]
    step = export_run(tmp_path / "run", tmp_path / "exported", JaxBackend(), dtype="float32")
    saved = one.save_pretrained(tmp_path / "saved", "float32")
    assert step == 1
    models = [opened(folder) for folder in (saved, tmp_path / "exported")]
    for path, value in models[0].params.items():
        np.testing.assert_array_equal(value, models[1].params[path], err_msg=path)
    np.testing.assert_array_equal(models[0].score, models[1].score)
    np.testing.assert_array_equal(models[0].score, np.asarray(one.params[SCORE]))
    begun = runner(saved)  # a reward model is trained further
    np.testing.assert_array_equal(np.asarray(begun.params[SCORE]), np.asarray(one.params[SCORE]))
    language = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
    other = JaxBackend().train_runner(language, StepSettings(OPTIMIZER))
    with pytest.raises(CheckpointError, match=r"it is of a reward model, and this run trains a language model"):
        Checkpoints(other, tmp_path / "run" / "checkpoints", CheckpointPolicy()).restore()


def test_what_is_no_reward_model_is_refused(checkpoint: Path) -> None:
    language = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
    with pytest.raises(RequestError, match=r"as a reward model, but it was opened with a language model head"):
        JaxBackend().train_runner(language, StepSettings(objective=OBJECTIVE))
    model = opened(checkpoint)
    with pytest.raises(RequestError, match=r"has no score.weight: train it with method='reward'"):
        model.rewards([[1]])
    spared = training_flops(language.spec, SEQ) - training_flops(model.spec, SEQ, head=False)
    assert spared == 3 * 2 * language.spec.parameters["head.kernel"].size  # no logits are computed
    with pytest.raises(UnsupportedError, match=r"no sequence classifier of that type"):
        classifier_of("llama4_text")
    with pytest.raises(UnsupportedError, match=r"weights of a reward model are trained themselves"):
        from ttpu_train.adapters import AdapterSettings

        runner(checkpoint, adapters=AdapterSettings(("q_proj",)))
    with pytest.raises(RequestError, match=r"opened without its language model head: pass the checkpoint's folder"):
        Trainer(language, method="reward", train_dataset=[]).loaded  # noqa: B018
    with pytest.raises(UnsupportedError, match=r"'torch_xla' opens language models alone"):
        Trainer(str(checkpoint), method="reward", backend="torch_xla", train_dataset=[]).loaded  # noqa: B018


def test_a_trainer_makes_a_reward_model_that_judges_completions(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PYDOC)
    folder = llama_checkpoint(tmp_path / "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    pairs = [{"prompt": f"{n}", "chosen": " good", "rejected": " bad", "margin": 0.1 * n} for n in range(6)]
    trainer = Trainer(
        str(folder), method="reward", center_rewards_coefficient=0.01, train_dataset=pairs, eval_dataset=pairs[:1],
        output_dir=tmp_path / "run", cache_dir=tmp_path, max_length=16, per_device_train_batch_size=6, max_steps=8,
        per_device_eval_batch_size=1, learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[-1]["accuracy"] == 1 and lines[-1]["loss"] < lines[0]["loss"] and "cross_entropy" not in lines[0]
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == 1 and metrics["eval_margin"] > 0 and "eval_perplexity" not in metrics
    with pytest.raises(RequestError, match=r"predict\(\) was called with method='reward'"):
        trainer.predict(pairs)
    saved = trainer.save_model(tmp_path / "reward", dtype="float32")
    judge = RewardModel(str(saved), lambda source: JaxBackend().open_reward_model(source, JaxLoadOptions()))
    found = judge(prompts=["1", "1", "1"], completions=[" good", " bad", ""], trainer_state=None)
    assert judge.__name__ == "reward" and found[0] - found[1] == pytest.approx(metrics["eval_margin"], abs=0.5)
    assert found[0] > found[1]
