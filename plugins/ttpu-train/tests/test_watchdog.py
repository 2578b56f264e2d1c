"""Updates that hang are reported, the slowest process is named, and chosen updates are traced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_train_runner import BigramModel, NumpyBackend, NumpyTrainRunner

import ttpu_train.trainer
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train import watchdog
from ttpu_train.arguments import TrainingArguments
from ttpu_train.profiling import Profiles
from ttpu_train.runner import RowLayout, StepSettings
from ttpu_train.trainer import Trainer
from ttpu_train.watchdog import Watchdog


class Traced(NumpyTrainRunner):
    """A runner that hangs in its fourth update, and writes what it traces."""

    hang = 0.0

    def step(self, batch: Any) -> Any:
        if self.step_count == 3:
            time.sleep(self.hang)
        return super().step(batch)

    def start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "begin").write_text(str(self.step_count))

    def stop_trace(self) -> None:
        (self.folder / "profile" / "end").write_text(str(self.step_count))


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, runner: Any, **given: Any) -> Trainer:
    backend = NumpyBackend()

    def made(model: BigramModel, settings: StepSettings) -> Any:
        runner.folder = folder
        return runner(model, settings)

    monkeypatch.setattr(backend, "train_runner", made)
    monkeypatch.setattr(ttpu_train.trainer, "training_backend", lambda name: backend)
    monkeypatch.setattr(ttpu_train.reporting.picture, "draw", lambda *_: None)
    data = [{"input_ids": [1, 2, 3, 4]}] * 8
    one = Trainer(BigramModel(5), train_dataset=data, max_length=4, max_steps=7, output_dir=folder, disable_tqdm=True,
                  save_strategy="no", **given)  # fmt: skip
    one.train()
    return one


def test_a_hung_update_is_reported_with_its_number_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Traced, "hang", 0.6)
    run(monkeypatch, tmp_path, Traced, hung_step_seconds=0.2)
    lines = [record.getMessage() for record in caplog.records if record.name == watchdog.__name__]
    (began,) = [number for number, line in enumerate(lines) if line.startswith("update 4 has taken 0.")]
    assert "s so far, the median is" in lines[began] and lines[began].endswith("it waits for devices")
    assert lines[began + 1].startswith("update 4 went on after ")


def test_updates_are_compared_with_the_median(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog.time, "perf_counter", lambda: now)
    one = Watchdog(10.0, None, process=2, processes=4)
    for step in range(1, 6):
        assert one.limit() is None
        one.begin(step, "devices")
        now += 2.0
        one.done(step)
    assert one.limit() == 20.0
    one.pause()
    now += 100.0  # an evaluation
    one.look()
    one.begin(6, "the next batch")
    now += 19.0
    one.look()
    assert not caplog.records
    now += 2.0
    one.look()
    one.look()
    assert [record.getMessage() for record in caplog.records] == [
        "update 6 has taken 21.0 s so far on process 2 of 4, the median is 2.00 s; it waits for the next batch"
    ]
    assert Watchdog(0.0, None).limit() is None


def test_updates_that_sample_completions_are_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog.time, "perf_counter", lambda: now)
    one = Watchdog(10.0, None)
    for step in range(1, 25):  # each rollout serves four updates
        samples = step % 4 == 1
        one.begin(step, "the next completions" if samples else "the next batch", samples=samples)
        now += 90.0 if samples else 0.1
        one.look()
        one.begin(step, "devices")
        now += 1.0
        one.look()
        one.done(step)
    assert not caplog.records
    one.begin(25, "the next completions", samples=True)
    now += 900.0
    one.look()
    assert not caplog.records
    now += 15.0
    one.look()
    one.done(25)
    one.begin(26, "the next batch")
    now += 20.0
    one.look()
    assert [record.getMessage().partition("so far")[0] for record in caplog.records] == [
        "update 25 has taken 915.0 s ", "update 25 went on after 915.0 s", "update 26 has taken 20.0 s "
    ]  # fmt: skip


def test_the_process_that_makes_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog.time, "perf_counter", lambda: now)

    class Gathering(NumpyTrainRunner):
        def gathered(self, value: float) -> tuple[float, ...]:
            return (0.5, value)

    one = Watchdog(10.0, None)
    for step in (1, 2):
        one.begin(step, "the next batch")
        now += 3.0
        one.begin(step, "devices")
        now += 1.0
        one.done(step)
    runner = Gathering(BigramModel(3), StepSettings(), RowLayout(2, 0, 2, 2))
    assert one.figures(runner) == {"host_seconds": 3.0, "slowest_process": 1}
    assert one.figures(runner) == {"host_seconds": 0.5, "slowest_process": 0}
    assert one.figures(NumpyTrainRunner(BigramModel(3), StepSettings())) == {}


def test_chosen_updates_are_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert issubclass(Traced, Profiles)
    run(monkeypatch, tmp_path, Traced, profile_steps="3-5")
    assert [(tmp_path / "profile" / name).read_text() for name in ("begin", "end")] == ["2", "5"]
    with pytest.raises(UnsupportedError, match="profile_steps=3 was given, but this backend's runner has no profiler"):
        run(monkeypatch, tmp_path / "other", NumpyTrainRunner, profile_steps=3)


@pytest.mark.parametrize("given", ["5-3", "all", (1, 2, 3), 0, ()])
def test_updates_to_trace_are_a_number_or_two(given: Any) -> None:
    with pytest.raises(RequestError, match="but it is a number of an update, or the first and the last"):
        TrainingArguments(profile_steps=given)
    assert np.array_equal(TrainingArguments(profile_steps=[4, 6]).profiled, (4, 6))
