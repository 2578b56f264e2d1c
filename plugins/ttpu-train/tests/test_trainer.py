"""The trainer over a runner in numpy: what it logs, evaluates, saves, resumes and refuses."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from data_cases import tokenizer
from numpy_train_runner import BigramModel, NumpyBackend, NumpyTrainRunner
from transformers import EarlyStoppingCallback
from transformers import TrainerCallback as TransformersCallback
from typer.testing import CliRunner

import ttpu_train.trainer
from ttpu_core.cli.main import app
from ttpu_core.errors import CheckpointError, DataError, MissingDependencyError, RequestError
from ttpu_core.files import write_whole
from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec
from ttpu_train.arguments import TrainingArguments
from ttpu_train.callbacks import EVENTS, TrainerCallback, TrainerControl, TrainerState
from ttpu_train.cli.train import what_is_left
from ttpu_train.data.packing import RowPlanner
from ttpu_train.evaluation import predict
from ttpu_train.inputs import warn_of_long_rows
from ttpu_train.reporting import picture
from ttpu_train.resuming import compare
from ttpu_train.run import TrainingError, Window
from ttpu_train.runner import Batch, RowLayout, StepSettings, StepValues
from ttpu_train.throughput import Meter
from ttpu_train.trainer import Trainer

VOCAB, LENGTH, ROWS = 11, 8, 4
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
COSINE = {"lr_scheduler_type": "cosine"}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NumpyBackend:
    made = NumpyBackend()
    monkeypatch.setattr(ttpu_train.trainer, "training_backend", lambda name: made)
    monkeypatch.setattr(picture, "draw", lambda *_: None)  # takes two seconds; drawn in a test of its own
    return made


def examples(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Sequences in which each token is mostly followed by its successor."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = [int(rng.integers(VOCAB))]
        while len(ids) < LENGTH:
            ids.append((ids[-1] + 1) % VOCAB if rng.random() < 0.9 else int(rng.integers(VOCAB)))
        made.append({"input_ids": ids})
    return made


def trainer(folder: Path, **given: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": folder,
        "train_dataset": examples(),
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "max_length": LENGTH,
        "learning_rate": 5.0,
        "logging_steps": 3,
        "save_steps": 5,
        "disable_tqdm": True,
        "max_steps": 12,
    }
    return Trainer(BigramModel(VOCAB), **{**defaults, **given})


def test_a_run_lowers_its_loss_and_leaves_log_checkpoints_and_picture(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(tmp_path, eval_dataset=examples(6, 1), eval_strategy="steps", eval_steps=6, run_name="bigrams")
    output = one.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    training, evaluation = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    assert [line["step"] for line in training] == [3, 6, 9, 12]
    assert [line["step"] for line in evaluation] == [6, 12]
    assert training[-1]["loss"] < 0.7 * training[0]["loss"]
    assert "mfu" not in training[-1]  # a model that is not described has no FLOPs
    assert evaluation[1]["eval_perplexity"] == pytest.approx(np.exp(evaluation[1]["eval_loss"]))
    assert 0 < evaluation[1]["eval_accuracy"] <= 1
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [5, 10, 12]
    assert output.global_step == 12
    assert output.metrics["train_tokens"] == 12 * ROWS * (LENGTH - 1)
    assert output.metrics["train_tokens_per_second"] > 0
    assert output.training_loss == pytest.approx(np.mean([line["loss"] for line in training]))


def test_a_run_is_drawn_at_its_end(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 2.0 / step, "eval_loss": 1.0, "grad_norm": 1.0} for step in (1, 2, 3)]
    picture.PictureReporter().on_train_end(
        TrainingArguments(output_dir=tmp_path), TrainerState(log_history=history), TrainerControl()
    )
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.parametrize("at", [5, 7])
def test_a_resumed_run_sees_the_same_rows_and_ends_with_the_same_weights(
    backend: NumpyBackend, tmp_path: Path, at: int
) -> None:
    whole = trainer(tmp_path / "whole", max_steps=14)
    whole.train()
    # The second run is made for as many updates, and stopped by a callback after some of them.
    part = trainer(tmp_path / "parts", max_steps=14, callbacks=[StopAt(at)])
    part.train()
    rest = trainer(tmp_path / "parts", max_steps=14)
    output = rest.train(resume_from_checkpoint=True)
    assert output.global_step == 14
    assert output.metrics["train_tokens"] == (14 - at) * ROWS * (LENGTH - 1)  # of this call
    expected, first, second = (np.stack(runner.rows) for runner in backend.runners)
    assert len(first) == at
    assert (np.concatenate([first, second]) == expected).all()
    assert (rest.loaded.table == whole.loaded.table).all()
    kept = [line["step"] for line in rest.state.log_history]
    assert kept == sorted(kept)
    lines = [json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert lines == kept


class StopAt(TrainerCallback):
    """Ends a run after an update, as a user's callback does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(
    backend: NumpyBackend, tmp_path: Path, number: signal.Signals
) -> None:
    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    output = trainer(tmp_path, callbacks=[Kill]).train()
    assert (output.global_step, output.stopped_by) == (4, number.name)
    assert (tmp_path / "checkpoints" / "4").is_dir()
    assert signal.getsignal(number) is before


def test_callbacks_hear_every_event_in_order(backend: NumpyBackend, tmp_path: Path) -> None:
    heard: list[str] = []

    class Listens(TrainerCallback):
        pass

    for event in EVENTS:
        setattr(Listens, event, lambda self, args, state, control, _event=event, **kwargs: heard.append(_event))
    one = trainer(
        tmp_path,
        callbacks=[Listens()],
        eval_dataset=examples(4, 1),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=2,
        max_steps=2,
    )
    one.train()
    one.predict(examples(3, 2))
    step = ["on_step_begin", "on_step_end"]
    assert heard == [
        "on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, "on_log", "on_log", "on_evaluate", "on_save",
        "on_epoch_end", "on_train_end", "on_predict",
    ]  # fmt: skip


def test_what_is_due_by_updates_comes_before_the_end_of_an_epoch(backend: NumpyBackend, tmp_path: Path) -> None:
    heard: list[str] = []

    class Listens(TrainerCallback):
        pass

    for event in ("on_step_end", "on_log", "on_save", "on_epoch_end", "on_evaluate"):
        setattr(Listens, event, lambda self, args, state, control, _event=event, **kwargs: heard.append(_event))
    given = {"callbacks": [Listens], "eval_dataset": examples(4, 1), "train_dataset": examples(8), "max_steps": 2}
    one = trainer(tmp_path, **given, eval_strategy="epoch", save_steps=2, logging_steps=2)
    one.train()
    assert heard == ["on_step_end", "on_step_end", "on_log", "on_save", "on_epoch_end", "on_log", "on_evaluate"]
    assert one.state.num_train_epochs == 1  # of two updates; num_train_epochs is 3


def test_events_that_are_never_called_are_told_of(backend: NumpyBackend, tmp_path: Path) -> None:
    class Counts(TransformersCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.warns(UserWarning, match="the callback Counts has on_optimizer_step, which is never called"):
        trainer(tmp_path, callbacks=[Counts])


def test_a_callback_of_transformers_stops_a_run_early(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(
        tmp_path,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        eval_dataset=examples(6, 1),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=300.0,  # of which the loss soon rises
        max_steps=60,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = one.train()
    assert output.global_step < 60
    best = one.state.best_global_step
    assert best is not None and best < output.global_step
    assert one.evaluate()["eval_loss"] == pytest.approx(one.state.best_metric)  # the best weights are back


def test_evaluations_that_improve_stop_no_run(backend: NumpyBackend, tmp_path: Path) -> None:
    stops = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)], "eval_dataset": examples(6, 1), **BEST}
    one = trainer(tmp_path / "falls", **stops, learning_rate=0.5, eval_steps=1, save_steps=1, max_steps=5)
    assert one.train().global_step == one.state.best_global_step == 5

    scores = iter([0.1, 0.28, 0.3, 0.25, 0.4, 0.5])
    stops["callbacks"] = [EarlyStoppingCallback(early_stopping_patience=1)]
    rising = {**stops, "metric_for_best_model": "score", "compute_metrics": lambda _: {"score": next(scores)}}
    two = trainer(tmp_path / "rises", **rising, eval_steps=1, save_steps=2, max_steps=6)
    assert two.train().global_step == 4
    assert two.state.best_global_step == 3  # which was not saved: the best that was is back
    assert two.runner.step_count == 2
    with pytest.raises(RequestError, match=r"train\(\) was called again after 2 updates"):
        two.train()
    assert two.train(resume_from_checkpoint=True).global_step == 6  # an earlier stop does not count


def evaluated(one: Trainer) -> list[int]:
    """The updates after which evaluations were logged."""
    return [line["step"] for line in one.state.log_history if "eval_loss" in line]


def saved(folder: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(place.name) for place in (folder / "checkpoints").iterdir() if place.is_dir())


def test_the_end_of_a_run_is_evaluated(backend: NumpyBackend, tmp_path: Path) -> None:
    data = {"eval_dataset": examples(6, 1), "learning_rate": 0.5}
    steps = trainer(tmp_path / "steps", **data, **BEST, eval_steps=4, save_steps=4, max_steps=6)
    assert steps.train().best_step == 6  # the loss falls
    assert evaluated(steps) == [4, 6] and saved(tmp_path / "steps") == [4, 6]

    by_epochs = {**data, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    epochs = trainer(tmp_path / "epochs", **by_epochs, max_steps=8)  # an epoch has 6 updates
    assert epochs.train().best_step == 8
    assert evaluated(epochs) == [6, 8] and saved(tmp_path / "epochs") == [6, 8]

    stopped = trainer(tmp_path / "stopped", **by_epochs, max_steps=8, callbacks=[StopAt(4)])
    assert stopped.train().global_step == 4
    assert evaluated(stopped) == saved(tmp_path / "stopped") == [4]


def test_data_that_end_early_are_told_of_and_the_end_is_evaluated(backend: NumpyBackend, tmp_path: Path) -> None:
    rollback = {"loss_spike_factor": 5.0, "loss_spike_action": "rollback", "max_steps": -1, "num_train_epochs": 2}
    data = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 1}
    heard: list[str] = []

    class Listens(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            heard.append("begin")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            heard.append("end")

    one = trainer(tmp_path, **rollback, **data, callbacks=[Listens])
    one.runner.spike_at = {7}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="the training data ended after update 10, but the run was to have 12") as told:
        assert one.train().global_step == 10
    assert len([each for each in told if "the training data ended" in str(each.message)]) == 1
    assert evaluated(one) == [4, 8, 10]
    assert heard == ["begin", "end"] * 2
    part = tmp_path / "part"
    trainer(part, callbacks=[Listens, StopAt(3)]).train()
    trainer(part, callbacks=[Listens]).train(resume_from_checkpoint=True)  # goes on within the first epoch
    assert heard == ["begin", "end"] * 5


def test_a_metric_that_is_not_finite_is_never_the_best(backend: NumpyBackend, tmp_path: Path) -> None:
    scores = iter([float("nan"), 0.5, 0.2, 0.1])
    given = {**BEST, "eval_dataset": examples(6, 1), "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "score"}
    given["compute_metrics"] = lambda _: {"score": next(scores)}
    one = trainer(tmp_path, **given, max_steps=3)
    assert one.train().best_step == 2
    assert (one.state.best_metric, one.state.best_global_step) == (0.5, 2)

    place = tmp_path / "checkpoints" / "3"  # as earlier versions wrote it
    kept, header = (json.loads((place / name).read_text()) for name in ("trainer.json", "run.json"))
    kept["state"] |= {"best_metric": float("nan"), "best_global_step": 1}
    (place / "trainer.json").write_text(json.dumps(kept))
    header["files"]["trainer.json"] = (place / "trainer.json").stat().st_size
    (place / "run.json").write_text(json.dumps(header))
    two = trainer(tmp_path, **given, max_steps=4)
    two.train(resume_from_checkpoint=True)
    assert (two.state.best_metric, two.state.best_global_step) == (0.1, 4)


def test_what_callbacks_ask_for_is_done_without_a_strategy(backend: NumpyBackend, tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 3

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

    class AsksTwice(Asks):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step in (4, 8)

    given = {"eval_dataset": examples(6, 1), "save_strategy": "no", "callbacks": [Asks]}
    one = trainer(tmp_path, **given)
    one.train()
    assert evaluated(one) == saved(tmp_path) == [4]
    file = tmp_path / "checkpoints" / "4" / "run.json"
    kept = (file.stat().st_ino, file.read_bytes())
    again = trainer(tmp_path, **{**given, "callbacks": [AsksTwice]})
    with pytest.warns(UserWarning, match="a callback asks for a checkpoint after update 4, but .* earlier run") as told:
        assert again.train().global_step == 12  # what was trained for hours is not lost
    assert len([each for each in told if "a callback asks" in str(each.message)]) == 1
    assert saved(tmp_path) == [4] and (file.stat().st_ino, file.read_bytes()) == kept
    without = trainer(tmp_path / "without", callbacks=[Asks])
    with pytest.raises(RequestError, match="an evaluation was asked for, but the Trainer has no eval_dataset"):
        without.train()


def test_an_evaluation_by_hand_is_logged(backend: NumpyBackend, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    class Listens(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.append(logs)

    one = trainer(tmp_path, eval_dataset=examples(6, 1), callbacks=[Listens])
    one.train()
    metrics = one.evaluate()
    assert metrics["epoch"] == one.state.epoch == 2
    assert heard[-1] == one.state.log_history[-1] == {**metrics, "step": 12}
    file = tmp_path / "log.jsonl"
    lines = file.read_text().splitlines()
    assert json.loads(lines[-1]) == heard[-1] and "loss" in json.loads(lines[-2])
    other = trainer(tmp_path, eval_dataset=examples(6, 1))  # does not touch the log of the run in its folder
    other.evaluate(metric_key_prefix="test")
    assert "test_loss" in other.state.log_history[-1] and file.read_text().splitlines() == lines


def test_the_time_of_evaluations_is_left_out_of_the_throughput(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 10}
    one = trainer(tmp_path, **data, callbacks=[StopAt(3)])
    one.train()
    last = one.state.log_history[-1]
    assert last["step"] == 3 and last["tokens_per_second_per_device"] > 0
    times = iter([0.0, 1.0, 11.0, 12.0, 12.0])
    monkeypatch.setattr("ttpu_train.throughput.time.perf_counter", lambda: next(times))
    meter = Meter(0.0, 1, None)
    meter.start()
    meter.add(8.0)
    with meter.paused():
        pass
    assert meter.figures() == {"step_seconds": 2.0, "tokens_per_second_per_device": 4.0}


def test_a_line_has_the_means_of_its_updates() -> None:
    window, nan = Window(), float("nan")
    window.add(StepValues(3.0, 2.0, 1.0, 1.0, 0.1, metrics={"rewards/chosen": 1.0}))
    window.add(StepValues(nan, nan, 1.0, nan, 0.1, skipped=True, metrics={"rewards/chosen": nan}))
    window.add(StepValues(5.0, 4.0, 1.0, 1.0, 0.1, metrics={"rewards/rejected": 2.0}))
    assert window.loss == 4.0 and window.skipped == 1
    assert window.means() == {"cross_entropy": 3.0, "rewards/chosen": 1.0, "rewards/rejected": 2.0}
    window = Window()
    window.add(StepValues(3.0, 3.0, 1.0, 1.0, 0.1))
    assert window.means() == {}  # nothing but the cross-entropy is minimized


def test_numbers_that_are_not_finite_are_null_in_the_log(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=3)
    one.runner.break_at = {1, 2, 3}  # type: ignore[attr-defined]
    one.train()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["loss"], found["grad_norm"], found["skipped_updates"]) == (None, None, 3)


def test_all_trackers_may_be_named_in_a_list(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_train.reporting.trackers.find_spec", lambda name: None)
    for every in ("all", ["all"]):
        trainer(tmp_path, report_to=every)
    with pytest.raises(MissingDependencyError, match="report_to='wandb' was asked for"):
        trainer(tmp_path, report_to=["wandb"])


@pytest.mark.parametrize(
    ("rate", "given"),
    [
        (5e-5, {}),
        (1e-6, {"method": "dpo"}),
        (1e-6, {"method": "orpo"}),
        (1e-6, {"method": "kto"}),
        (1e-6, {"method": "grpo", "reward_funcs": len, "max_completion_length": 2}),
        (1e-4, {"method": "reward"}),
        (2e-5, {"method": "distill", "teacher_model": "a"}),
    ],
)
def test_each_method_has_a_learning_rate(
    backend: NumpyBackend, tmp_path: Path, rate: float, given: dict[str, Any]
) -> None:
    args = trainer(tmp_path, **given, learning_rate=None).args
    assert args.learning_rate == args.step_settings(1).optimizer.learning_rate == rate
    assert trainer(tmp_path, **given, learning_rate=5e-5).args.learning_rate == 5e-5
    ends_higher = trainer(tmp_path, **given, learning_rate=None, **COSINE, lr_scheduler_kwargs={"min_lr": 1e-3})
    with pytest.raises(RequestError, match=r"min_lr=0\.001, but it is a number from 0 to"):
        _ = ends_higher.runner  # and not before: a resumed run may have another rate


def test_a_resumed_run_keeps_its_learning_rate(
    backend: NumpyBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, max_steps=2).train()
    for where in (True, tmp_path / "checkpoints" / "2"):
        one = trainer(tmp_path, max_steps=2, learning_rate=None)
        with pytest.warns(UserWarning, match="nothing is left to do"):
            one.train(resume_from_checkpoint=where)
        assert one.args.learning_rate == 5.0 and not caplog.messages
    new = trainer(tmp_path / "new", max_steps=2, learning_rate=None)
    with pytest.warns(UserWarning, match="has no checkpoint: the run begins anew"):
        new.train(resume_from_checkpoint=True)
    assert new.args.learning_rate == 5e-5
    ends_high = {"learning_rate": None, **COSINE, "lr_scheduler_kwargs": {"min_lr": 2.0}, "max_steps": 3}
    assert trainer(tmp_path, **ends_high).train(resume_from_checkpoint=True).global_step == 3
    with pytest.raises(RequestError, match=r"min_lr=2\.0, but it is a number from 0 to 5e-05"):
        trainer(tmp_path / "other", **ends_high).train()


def test_a_rate_that_is_compiled_already_is_not_resumed_with(backend: NumpyBackend, tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    used = trainer(tmp_path, max_steps=3, learning_rate=None, eval_dataset=examples(6, 1))
    used.evaluate()
    with pytest.raises(RequestError, match=r"used before train\(\), .* compiled with 5e-05: pass learning_rate=5, or"):
        used.train(resume_from_checkpoint=True)
    given = trainer(tmp_path, max_steps=3, eval_dataset=examples(6, 1))
    given.evaluate()
    assert given.train(resume_from_checkpoint=True).global_step == 3


def test_an_export_takes_the_best_checkpoint_of_a_run(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.5, 0.2, 0.3, 0.4])
    given = {**BEST, "eval_dataset": examples(6, 1), "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "score"}
    given |= {"compute_metrics": lambda _: {"score": next(scores)}}
    run = tmp_path / "run"
    output = trainer(run, **given, max_steps=3).train()
    assert output.best_step == 2 and "writes the best model, of update 2" in what_is_left(output, run, is_saved=True)
    monkeypatch.setattr("ttpu_train.inputs.training_backend", lambda name: backend)

    def exported(*more: str) -> str:
        done = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out"), "--dtype=float32", *more])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "the weights after update 2, the best of the run by eval_score (0.5), in float32" in exported()
    assert "the weights after update 3, in float32" in exported("--step", "3")
    best = [json.loads(exported("--json", *more))["is_best"] for more in ((), ("--step=2",), ("--step=3",))]
    assert best == [True, True, False]
    more = {"max_steps": 5, "callbacks": [StopAt(4)], "load_best_model_at_end": False}
    trainer(run, **{**given, **more}).train(resume_from_checkpoint=True)
    assert "the weights after update 4, in float32" in exported()  # the run went on


def test_a_best_checkpoint_that_cannot_be_recorded_ends_no_run(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ttpu_train.checkpoints.write_whole", full)
    given = {**BEST, "eval_dataset": examples(6, 1), "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    with pytest.warns(UserWarning, match=r"could not be recorded .*No space left.*: pass --step 2 to `ttpu export`"):
        output = trainer(tmp_path, **given).train()
    assert output.best_step == 2
    assert "--out DIR --step 2` writes the best model, of update 2" in what_is_left(output, tmp_path, is_saved=True)


def test_epochs_give_the_number_of_updates(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(
        tmp_path, max_steps=-1, num_train_epochs=2, train_dataset=examples(10), save_strategy="epoch", logging_steps=0.5
    )
    assert one.train().global_step == 6  # of 10 rows, 4 a batch
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [3, 6]
    assert one.state.epoch == pytest.approx(2)
    assert [line["step"] for line in one.state.log_history] == [3, 6]
    assert backend.runners[0].settings.optimizer.schedule.total_steps == 6


def test_updates_that_are_not_finite_are_skipped_and_too_many_end_the_run(
    backend: NumpyBackend, tmp_path: Path
) -> None:
    one = trainer(tmp_path / "some")
    one.runner.break_at = {4, 5}  # type: ignore[attr-defined]
    output = one.train()
    assert output.global_step == 12
    assert [line.get("skipped_updates") for line in one.state.log_history] == [None, 2, None, None]
    assert np.isfinite(output.training_loss)

    many = trainer(tmp_path / "many", nan_limit=3)
    many.runner.break_at = {7, 8, 9}  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"3 updates in a row .* not finite.*from the newest checkpoint\.$"):
        many.train()
    assert sorted(int(path.name) for path in (tmp_path / "many/checkpoints").iterdir()) == [5]
    unsaved = trainer(tmp_path / "unsaved", nan_limit=1, save_strategy="no")
    unsaved.runner.break_at = {2}  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"or look at the data\.$"):
        unsaved.train()


def test_a_spike_brings_the_weights_of_the_newest_checkpoint_back(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(tmp_path, loss_spike_factor=5.0, loss_spike_action="rollback", logging_steps=1)
    one.runner.spike_at = {7}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="the weights of step 5 are back"):
        assert one.train().global_step == 12
    (runner,) = backend.runners
    assert len(runner.rows) > 12
    steps = [line["step"] for line in one.state.log_history]
    assert steps == list(range(1, 13))  # the lines after the checkpoint come once

    data = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 9, "save_steps": 3}
    ahead = trainer(tmp_path / "ahead", **data, loss_spike_factor=5.0, loss_spike_action="rollback", logging_steps=12)
    ahead.runner.spike_at = {7}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="the weights of step 6 are back"):  # when update 9 was given to the devices
        ahead.train()
    assert evaluated(ahead) == [9, 12]  # and not 6

    endless = trainer(tmp_path / "endless", loss_spike_factor=5.0, loss_spike_action="rollback", logging_steps=1)
    endless.runner.spike_at = set(range(7, 90))  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="after 3 rollbacks"), pytest.warns(UserWarning, match="are back"):
        endless.train()

    warned = trainer(tmp_path / "warn", loss_spike_factor=5.0, max_steps=9, logging_steps=9)
    warned.runner.spike_at = {7}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="the loss of step 7 is .*, more than 5 times its running mean"):
        assert warned.train().global_step == 9  # update 8 was given to the devices when the loss of 7 was read


def test_metrics_of_the_user_join_an_evaluation(backend: NumpyBackend, tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        guessed, labels = prediction
        counted = labels[:, 1:] != -100
        return {"hits": float((guessed[:, :-1] == labels[:, 1:])[counted].mean())}

    one = trainer(
        tmp_path,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        eval_dataset=examples(6, 1),
    )
    one.train()
    metrics = one.evaluate()
    assert metrics["eval_hits"] == pytest.approx(metrics["eval_accuracy"])
    runner = cast(NumpyTrainRunner, one.runner)
    assert runner.evaluated == runner.predicted > 0  # one pass gives both
    predicted = one.predict(examples(5, 3), metric_key_prefix="test")
    assert predicted.predictions.shape == predicted.label_ids.shape == (5, LENGTH)
    assert predicted.metrics["test_hits"] == pytest.approx(predicted.metrics["test_accuracy"])
    assert runner.evaluated == runner.predicted


def test_datasets_of_a_mapping_are_evaluated_by_name_and_together(backend: NumpyBackend, tmp_path: Path) -> None:
    data = {"a": examples(6, 1), "b": iter(examples(5, 2))}
    stops = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)], **BEST, "metric_for_best_model": "b_loss"}
    one = trainer(tmp_path, **stops, eval_dataset=data, learning_rate=0.5, eval_steps=1, save_steps=1, max_steps=3)
    assert one.train().global_step == one.state.best_global_step == 3
    found = one.evaluate()
    assert found["eval_b_loss"] == pytest.approx(one.state.best_metric)
    alone, both = one.evaluate(data["a"]), one.evaluate([data["a"], examples(5, 2)])
    assert {key.replace("eval_a_", "eval_") for key in found if key.startswith("eval_a_")} == set(alone) - {"epoch"}
    for key in ("loss", "accuracy", "tokens"):
        assert found[f"eval_a_{key}"] == pytest.approx(alone[f"eval_{key}"])
        assert found[f"eval_{key}"] == pytest.approx(both[f"eval_{key}"])
    one.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    measured = one.evaluate({"c": examples(3), "d": examples(4)}, metric_key_prefix="test")
    assert (measured["test_c_rows"], measured["test_d_rows"]) == (3, 4) and "test_loss" in measured


def test_metrics_may_be_numbers_of_numpy(backend: NumpyBackend, tmp_path: Path) -> None:
    def measured(prediction: Any) -> dict[str, Any]:
        return {"top": prediction.predictions.max(), "count": np.int64(3), "each": np.arange(2)}

    data = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 5}
    one = trainer(tmp_path, **data, compute_metrics=measured, metric_for_best_model="top")
    one.train()
    assert isinstance(one.state.best_metric, float)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["eval_each"] for line in lines if line.get("eval_count") == 3] == [[0, 1]] * 3
    header = json.loads((tmp_path / "checkpoints" / "5" / "run.json").read_text())
    assert header["metrics"]["eval_top"] == lines[1]["eval_top"] > 0
    with pytest.raises(RequestError, match="compute_metrics returned NoneType 'None', but metrics by name are needed"):
        trainer(tmp_path / "none", **data, compute_metrics=lambda _: None).train()


def test_several_processes_measure_all_rows() -> None:
    def made(process: int = 0, processes: int = 1) -> NumpyTrainRunner:
        return NumpyTrainRunner(BigramModel(VOCAB), StepSettings(), RowLayout(processes, process, processes))

    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCAB, (4, LENGTH)).astype(np.int32) for _ in range(2)]
    places = np.tile(np.arange(LENGTH, dtype=np.int32), (4, 1))
    places[3] = -1  # the last row of each batch fills it up

    def batches(own: slice) -> Iterator[Batch]:
        return iter([Batch(one[own], (places[own] > 0).astype(np.float32), places[own]) for one in rows])

    first, second, whole = (made(*which) for which in ((0, 2), (1, 2), ()))
    of_second: list[np.ndarray] = []
    second.gathered_rows = lambda rows: (of_second.append(rows), rows)[1]  # type: ignore[attr-defined]
    predict(second, batches(slice(2, 4)))
    first.gathered_rows = lambda rows: np.concatenate([rows, of_second.pop(0)])  # type: ignore[attr-defined]
    found, wanted = predict(first, batches(slice(2))), predict(whole, batches(slice(4)))
    assert wanted.label_ids.shape == (6, LENGTH)
    np.testing.assert_array_equal(found.label_ids, wanted.label_ids)
    np.testing.assert_array_equal(found.predictions, wanted.predictions)


def test_a_tokenizer_that_was_given_is_saved_with_the_model(backend: NumpyBackend, tmp_path: Path) -> None:
    given = copy.deepcopy(tokenizer())
    given.chat_template = "{{ messages[0].content }}"
    one = trainer(tmp_path / "run", max_steps=2, processing_class=given)
    one.train()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "added_tokens.json").write_text("of another tokenizer")
    for folder in (one.save_model(tmp_path / "saved", "float32"), tmp_path / "run" / "checkpoints" / "2" / "model"):
        assert (folder / "chat_template.jinja").read_text() == given.chat_template
        assert (folder / "tokenizer.json").is_file() and not (folder / "added_tokens.json").exists()
    given.chat_template = {"default": "a", "tool_use": "b"}  # which transformers keeps in a folder of files
    assert all(file.is_file() for file in one.save_model(tmp_path / "saved", "float32").iterdir())


def test_all_processes_wait_for_a_saved_tokenizer_and_hear_when_it_fails(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(tmp_path / "run", max_steps=2, processing_class=copy.deepcopy(tokenizer()))
    told: list[tuple[bool, bool]] = []

    def any_process(failed: bool) -> bool:
        told.append((failed, (tmp_path / "saved" / "tokenizer.json").is_file()))
        return failed or len(told) > 1

    monkeypatch.setattr(one.runner, "any_process", any_process)
    for index in (0, 1):
        monkeypatch.setattr(one, "layout", RowLayout(process_index=index, process_count=2))
        if index == 0:
            one.save_model(tmp_path / "saved", "float32")
        else:
            with pytest.raises(CheckpointError, match="failed in another process: make room"):
                one.save_model(tmp_path / "saved", "float32")
    assert told == [(False, True), (False, True)]
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("ttpu_train.trainer.replace_tokenizer", Mock(side_effect=full))
    monkeypatch.setattr(one, "layout", RowLayout(process_count=2))
    with pytest.raises(CheckpointError, match=r"\(No space left on device\): make room"):
        one.save_model(tmp_path / "saved", "float32")
    assert told[-1] == (True, True)


def test_tensorboard_gets_the_log(backend: NumpyBackend, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    trainer(tmp_path, report_to="tensorboard").train()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_old_checkpoints_go_and_the_newest_stay(backend: NumpyBackend, tmp_path: Path) -> None:
    trainer(tmp_path, save_steps=2, save_total_limit=2).train()
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [10, 12]
    by_loss = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer(tmp_path / "evaluated", **by_loss, save_total_limit=2).train()  # no metric says which is the best
    assert saved(tmp_path / "evaluated") == [10, 12]
    trainer(tmp_path / "none", save_strategy="no").train()
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_checkpoints_of_runs_are_not_mixed_up(backend: NumpyBackend, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no checkpoint: the run begins anew"):
        assert trainer(tmp_path / "a").train(resume_from_checkpoint=True).global_step == 12
    with pytest.raises(RequestError, match=r"has checkpoints of an earlier one \(newest: 12\)"):
        trainer(tmp_path / "a").train()
    with pytest.raises(RequestError, match=r"'elsewhere/5' was given, but that is no checkpoint; .*/5, "):
        trainer(tmp_path / "a").train(resume_from_checkpoint="elsewhere/5")
    tenth = tmp_path / "a" / "checkpoints" / "10"
    with pytest.raises(RequestError, match=r"newer checkpoints \(12\)"):
        trainer(tmp_path / "a").train(resume_from_checkpoint=tenth)
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(RequestError, match=r"of another run, and .* has checkpoints of its own \(5, 10, 12\)"):
        trainer(copy).train(resume_from_checkpoint=tenth)
    trainer(tmp_path / "b").train(resume_from_checkpoint=tenth)
    assert len(backend.runners[-1].rows) == 2
    assert sorted(int(path.name) for path in (tmp_path / "b" / "checkpoints").iterdir()) == [12]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rat": 1.0}, "did you mean learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 was given, but it is 0 or more"),
        ({"learning_rate": float("nan")}, "learning_rate=nan was given"),
        ({"learning_rate": float("inf")}, "learning_rate=inf was given, but it is a finite number"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs=inf was given, but it is a finite number"),
        ({"save_steps": float("inf")}, "save_steps=inf was given"),
        ({"nan_limit": -1}, "nan_limit=-1 was given, but it is 0 or more"),
        ({"learning_rate": "fast"}, "learning_rate='fast' was given, but it is a number"),
        ({"max_steps": 2.5}, "max_steps=2.5 was given, but it is a whole number"),
        ({"packing": "yes"}, "packing='yes' was given, but it is true or false"),
        ({"optim": ["adamw"]}, "optim=['adamw'] was given, but it is a text"),
        ({"lr_scheduler_type": [1]}, "lr_scheduler_type=[1] was given, but it is a text"),
        ({"report_to": 5}, "report_to=5 was given, but it is a text or a list of texts"),
        ({"trainable": "layers.*"}, "trainable='layers.*' was given, but it is a list of texts"),
        ({"trainable": [5]}, "trainable=[5] was given, but it is a list of texts"),
        ({"output_dir": None}, "output_dir=None was given, but it is a path"),
        ({"output_dir": ""}, "output_dir='' was given, but it is a path"),
        ({"document_separator": 5}, "document_separator=5 was given, but it is a text"),
        ({"mixture_weights": ["a"]}, "mixture_weights=['a'] was given, but it is a list of numbers"),
        ({"zero_stage": True}, "zero_stage=True was given, but it is 0, 1, 2, 3 or None"),
        ({"data_seed": -1}, "data_seed=-1 was given, but it is 0 or more"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1 was given, but it is 0 or more"),
        ({"load_options": 5}, "load_options=5 was given, but it is a mapping"),
        ({"optim": "adamw_apex"}, "optim='adamw_apex' was given, but it is one of adamw"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_type='linear' takes none"),
        ({**COSINE, "lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs was given power"),
        ({**COSINE, "lr_scheduler_kwargs": {"min_lr_rate": "a tenth"}}, "min_lr_rate='a tenth', but it is a number"),
        ({**COSINE, "lr_scheduler_kwargs": {"min_lr": 9.0}}, "min_lr=9.0, but it is a number from 0 to 5"),
        ({**COSINE, "lr_scheduler_kwargs": {"min_lr": 0.1, "min_lr_rate": 0.1}}, "min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "without the rate that it ends at"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps=None, but it needs the number of updates"),
        ({"lr_scheduler_kwargs": "min_lr=0"}, "lr_scheduler_kwargs='min_lr=0' was given, but it is a mapping"),
        ({"gradient_checkpointing": True, "remat": "none"}, "contradict each other"),
        ({"gradient_checkpointing": False, "remat": "dots"}, "contradict each other"),
        ({"zero_stage": 4}, "zero_stage=4 was given, but it is 0, 1, 2, 3 or None"),
        ({"load_best_model_at_end": True}, "set both to steps"),
        ({**BEST, "eval_steps": 2, "save_steps": 5}, "make save_steps a multiple of eval_steps"),
        ({**BEST, "eval_steps": 4, "save_steps": 2}, "make save_steps a multiple of eval_steps"),
        ({"report_to": "excel"}, "report_to='excel'"),
        ({"tokenizer": "./llama"}, "processing_class='./llama' was given, but it is a tokenizer of transformers"),
        ({"callbacks": [object()]}, "none of the methods"),
        ({"callbacks": StopIteration()}, "callbacks was given as a StopIteration, but it is a list"),
        ({"args": SimpleNamespace()}, "args was given as a types.SimpleNamespace, but it is ttpu.TrainingArguments"),
        ({"tokenizer": "a", "processing_class": "b"}, "processing_class and tokenizer were given"),
        ({"parallelism_strategy": "fsdp"}, "parallelism_strategy was given with a loaded BigramModel"),
        ({"load_options": {"dtype": "auto"}}, "load_options was given with a loaded BigramModel"),
        ({"momentum": 0.9}, "momentum was given, but it has no effect without optim: sgd or muon"),
        ({"loss_spike_action": "rollback"}, "no effect without loss_spike_factor"),
        ({"loss_spike_action": "rollback", "loss_spike_factor": 3, "save_strategy": "no"}, "without save_strategy"),
        ({"logging_steps": 2.5}, "logging_steps=2.5 was given, but it is a whole number, or a share below 1"),
        ({"eval_tasks_engine_options": ["a"]}, "eval_tasks_engine_options=['a'] was given, but it is a mapping"),
        ({"method": "dpo", "beta": "high"}, "beta='high' was given, but it is a number"),
        ({"method": "distill", "teacher_model": "a", "beta": float("nan")}, "beta=nan was given, but it is a finite"),
        ({"method": "grpo", "reward_funcs": len, "num_generations": "8"}, "num_generations='8' was given"),
        ({"method": "grpo", "reward_funcs": len, "steps_per_generation": 0}, "steps_per_generation=0 was given"),
        ({"method": "grpo", "reward_funcs": len, "top_p": 5.0}, "top_p is 5.0"),
        ({"args": TrainingArguments()}, "both args and"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    backend: NumpyBackend, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        trainer(tmp_path, **given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_data_and_a_model_are_needed(backend: NumpyBackend, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="model=5 was given, but it is a checkpoint's folder"):
        Trainer(5)
    with pytest.raises(DataError, match="an empty mapping was given as training data"):
        trainer(tmp_path, train_dataset={}).train()
    with pytest.raises(RequestError, match="without train_dataset"):
        trainer(tmp_path, train_dataset=None).train()
    with pytest.raises(RequestError, match="eval_strategy='steps' was asked for, but there is no eval_dataset"):
        trainer(tmp_path, eval_strategy="steps")
    with pytest.warns(UserWarning, match="eval_steps, eval_on_start was given, but has no effect without"):
        trainer(tmp_path, eval_steps=2, eval_on_start=True, callbacks=None)
    with pytest.raises(RequestError, match="no eval_dataset"):
        trainer(tmp_path).evaluate()


def test_a_folder_that_cannot_be_written_to_is_named(backend: NumpyBackend, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RequestError, match=r"output_dir='.*/run' was given for the files of the run, but it cannot be"):
        trainer(tmp_path / "run").train()
    with pytest.raises(RequestError, match=r"output_dir='.*/run/inside' was given"):
        trainer(tmp_path / "run" / "inside").train()


def test_a_resumed_run_names_each_argument_that_changed(
    backend: NumpyBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 5}
    first = trainer(tmp_path, **data, load_best_model_at_end=True)
    first.train()
    assert first.state.best_metric is not None
    changes = {"learning_rate": 1.0, "max_steps": 16, "gradient_accumulation_steps": 2, "logging_steps": 1}
    again = trainer(tmp_path, **data, **changes, metric_for_best_model="accuracy")
    assert again.train(resume_from_checkpoint=True).global_step == 16
    begin = "resumed with other arguments than the checkpoint's: "
    said = [line.removeprefix(begin) for line in caplog.messages if line.startswith(begin)]
    assert {line.partition(";")[0] for line in said} == {
        "learning_rate 5.0 → 1.0",
        "rows of an update 4 → 8",
        "updates of the run 12 → 16",
        "metric_for_best_model loss → accuracy",
        "greater_is_better False → True",
    }
    assert any("in other updates" in line for line in said)
    assert again.state.best_metric is not None and 0 < again.state.best_metric <= 1  # an accuracy, not the old loss
    # 12 updates of 4 rows and 4 of 8: no row is left out, and none comes twice
    assert len(np.concatenate([rows for runner in backend.runners for rows in runner.rows])) == 12 * 4 + 4 * 8
    caplog.clear()
    with pytest.warns(UserWarning, match="of update 16, and the run has 16: nothing is left to do"):
        trainer(tmp_path, **data, **changes, metric_for_best_model="accuracy").train(resume_from_checkpoint=True)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": 1}, "with seed=42, but this run has seed=1"),
        ({"train_dataset": examples(seed=5)}, "it is one in other training data"),
        ({"max_length": 6}, "other training data|max_length=8"),
    ],
)
def test_a_run_is_not_resumed_with_other_data(
    backend: NumpyBackend, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    trainer(tmp_path, max_steps=2).train()
    with pytest.raises(CheckpointError, match=said):
        trainer(tmp_path, **{"max_steps": 4, **given}).train(resume_from_checkpoint=True)


def test_a_run_is_not_resumed_by_another_method() -> None:
    with pytest.raises(RequestError, match="method='dpo' was to be resumed with method='orpo'"):
        compare({"method": "dpo"}, {"method": "orpo"}, tells=True)


def test_a_full_disk_stops_the_log_and_not_the_run(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = {"is": True}

    def written(*given: Any, **named: Any) -> None:
        if not room["is"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(*given, **named)

    class Full(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            room["is"] = not 2 <= state.global_step < 8
            if state.global_step == 2:  # a folder in the file's place cannot be opened
                (tmp_path / "log.jsonl").rename(tmp_path / "aside")
                (tmp_path / "log.jsonl").mkdir()
            if state.global_step == 8:
                (tmp_path / "log.jsonl").rmdir()

    monkeypatch.setattr("ttpu_train.reporting.jsonl.write_whole", written)
    assert trainer(tmp_path, callbacks=[Full], logging_steps=1).train().global_step == 12
    assert len([line for line in caplog.messages if "the log was to be written to" in line]) == 1
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_a_metric_that_no_evaluation_gives_is_refused_by_name(backend: NumpyBackend, tmp_path: Path) -> None:
    given = {"eval_dataset": examples(6, 1), "eval_strategy": "steps", "eval_steps": 3}
    with pytest.raises(TrainingError, match="'bleu' was asked for, but an evaluation gives loss, perplexity, accuracy"):
        trainer(tmp_path, **given, metric_for_best_model="bleu").train()
    assert (tmp_path / "checkpoints" / "3").is_dir()  # from which the run goes on with another name
    trainer(tmp_path, **given, metric_for_best_model="accuracy").train(resume_from_checkpoint=True)


def test_rows_that_are_longer_than_the_models_positions_are_told_of(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttpu_train.trainer, "training_flops", lambda *_, **__: 0.0)
    one = trainer(tmp_path, max_steps=1)
    named = ArchitectureSpec("tiny", EmbeddingSpec(64, 8, positions=LENGTH), (), None, HeadSpec(), LENGTH - 1)
    one.loaded.architecture = SimpleNamespace(spec=named)
    with pytest.warns(UserWarning, match="max_length=8 was given, but the model's config names 7 positions"):
        one.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_long_rows(LENGTH, replace(named, max_position_embeddings=LENGTH))
        warn_of_long_rows(LENGTH, None)  # of a model without a plugin
    with pytest.raises(RequestError, match=r"^max_length is 9, but this model has learned 8 positions, .* lower it\.$"):
        warn_of_long_rows(LENGTH + 1, named)


def test_a_run_of_another_library_is_not_begun_over(backend: NumpyBackend, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "trainer_state.json").write_text("{}")
    with pytest.raises(RequestError, match="a folder with checkpoints of transformers' Trainer, which"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(RequestError, match="but that is a checkpoint of transformers' Trainer; those of this run are"):
        trainer(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-500")


def test_what_is_wrong_with_evaluation_data_is_said_before_the_first_update(
    backend: NumpyBackend, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="it is empty"):
        trainer(tmp_path, eval_dataset=[], eval_strategy="steps").train()
    assert not backend.runners[0].rows


def test_ids_beyond_the_vocabulary_are_refused(backend: NumpyBackend, tmp_path: Path) -> None:
    one = trainer(tmp_path, train_dataset=[{"input_ids": [1, VOCAB, 2]}] * 8)
    one.loaded.architecture = SimpleNamespace(spec=SimpleNamespace(vocab_size=VOCAB, layers=()))
    with pytest.raises(DataError, match="have the token id 11, but the model's vocabulary has 11 tokens"):
        next(one.training_batches)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 GiB"), TrainingError, "lower per_"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_devices_without_room_for_an_update_are_named(
    backend: NumpyBackend, tmp_path: Path, error: Exception, kind: type[Exception], said: str
) -> None:
    class Stops(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise error

    with pytest.raises(kind, match=said):
        trainer(tmp_path, callbacks=[Stops]).train()


def test_a_batch_that_the_host_cannot_hold_is_refused(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(RowPlanner, "batch", none_left)
    with pytest.raises(RequestError, match="batches of 4 rows of 8 tokens were asked for, but this machine's memory"):
        trainer(tmp_path).train()
