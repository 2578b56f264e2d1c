"""Tasks of the harness during a training, over a harness and an engine that only count."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from numpy_train_runner import BigramModel, NumpyBackend, NumpyTrainRunner

import ttpu_train.live_engine
import ttpu_train.task_evaluation
import ttpu_train.trainer
from ttpu_core.errors import MissingDependencyError, RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_train.arguments import TrainingArguments
from ttpu_train.config_file import read_training_file
from ttpu_train.reporting import picture
from ttpu_train.task_evaluation import TaskEvaluation
from ttpu_train.trainer import Trainer

TOKENIZER = SimpleNamespace(get_vocab=dict, eos_token_id=0, bos_token_id=None, chat_template=None)


class Services:
    """The services "engine" and "harness", and the engine, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.options: Mapping[str, Any] = {}
        self.asked: tuple[Any, ...] = ()

    def service(self, name: str) -> Any:
        return {"engine": self, "harness": self}[name]

    def config(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        self.options = options
        return options

    def build(self, model: Any, config: Any) -> Any:
        self.calls.append(("build", model))
        return self

    def update_weights(self, weights: Any) -> None:
        self.calls.append(("update", weights))

    def wake_up(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def load(self, tasks: Sequence[str], **asked: Any) -> Services:
        self.asked = tuple(tasks), asked
        return self

    def evaluate(self, engine: Any, tokenizer: Any, max_model_len: int, *, quiet: bool) -> dict[str, float]:
        self.calls.append(("tasks", max_model_len))
        return {"arc_easy_acc": 1.0 / len(self.calls)}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    made = Services()
    monkeypatch.setattr(ttpu_train.live_engine, "default_registry", lambda: made)
    monkeypatch.setattr(ttpu_train.task_evaluation, "default_registry", lambda: made)
    monkeypatch.setattr(ttpu_train.trainer, "training_backend", lambda name: NumpyBackend())
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    monkeypatch.setattr(NumpyTrainRunner, "rollout_model", lambda self: self.step_count, raising=False)
    monkeypatch.setattr(NumpyTrainRunner, "rollout_weights", lambda self: self.step_count, raising=False)
    return made


def trainer(folder: Path, **given: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": folder, "train_dataset": [{"input_ids": [1, 2, 3]}] * 4, "max_length": 8, "max_steps": 2,
        "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
        "eval_tasks": ["arc_easy"], "disable_tqdm": True, "processing_class": TOKENIZER,
    }  # fmt: skip
    return Trainer(BigramModel(5), **{**arguments, **given})


def test_tasks_see_the_weights_of_each_evaluation_and_choose_the_best(services: Services, tmp_path: Path) -> None:
    one = trainer(
        tmp_path, eval_tasks_num_fewshot=3, eval_tasks_limit=10, load_best_model_at_end=True,
        metric_for_best_model="arc_easy_acc", eval_tasks_engine_options={"max_model_len": 64},
    )  # fmt: skip
    one.train()
    evaluated = ["wake", ("tasks", 64), "sleep"]
    assert services.calls == [("build", 0), "sleep", ("update", 1), *evaluated, ("update", 2), *evaluated]
    assert services.asked == (("arc_easy",), {"num_fewshot": 3, "limit": 10, "apply_chat_template": False})
    assert services.options["prompt_logprobs"] is True and services.options["sampling_level"] == "draw"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    values = [line["eval_arc_easy_acc"] for line in lines if "eval_arc_easy_acc" in line]
    assert len(values) == 2 and one.state.best_metric == max(values) and one.state.best_global_step == 1


def test_tasks_come_with_the_loss_of_evaluation_data(services: Services, tmp_path: Path) -> None:
    one = trainer(tmp_path, eval_dataset=[{"input_ids": [1, 2, 3]}])
    assert {"eval_loss", "eval_arc_easy_acc"} <= one.evaluate().keys()
    assert "eval_arc_easy_acc" not in one.evaluate(eval_dataset=[{"input_ids": [1, 2]}])


def test_what_tasks_need_is_said(services: Services, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer for the tasks' texts"):
        trainer(tmp_path, processing_class=None).train()
    with pytest.raises(UnsupportedError, match="eval_tasks samples with the weights in training"):
        TaskEvaluation(TrainingArguments(eval_tasks="piqa"), cast(Any, SimpleNamespace()), TOKENIZER, None)
    with pytest.raises(RequestError, match="eval_tasks_limit=0"):
        TrainingArguments(eval_tasks_limit=0)
    with pytest.raises(RequestError, match="writes none: leave it out"):
        trainer(tmp_path, method="reward")
    with pytest.raises(RequestError, match="give it some data, or eval_tasks"):
        trainer(tmp_path, eval_tasks=None)
    named = TrainingArguments(eval_strategy="epoch", metric_for_best_model="wikitext_word_perplexity")
    assert named.best_is_greatest is False


def test_files_of_tasks_are_beside_the_training_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("task: own")
    (tmp_path / "piqa").mkdir()  # the name of a task is no path
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_dataset: t\neval_tasks: [own.yaml, piqa]\n")
    assert read_training_file(file).arguments["eval_tasks"] == [str(tmp_path / "own.yaml"), "piqa"]
    assert read_training_file(file, ["eval_tasks=piqa"]).arguments["eval_tasks"] == "piqa"


def test_the_service_of_tasks_is_found_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = default_registry().service("harness")
    monkeypatch.setattr("ttpu_quantize.harness.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'arc_easy were asked for, but .* `pip install "ttpu-quantize'):
        harness.load(["arc_easy"])
