"""The checkpoints of a run, which are the same for all backends but for their arrays: what is committed, kept, passed
over, refused and exported."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_train_runner import BigramModel, NumpyBackend, NumpyFiles, NumpyTrainRunner

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_train import checkpoints
from ttpu_train.checkpoints import BestCheckpoint, Checkpoints, recorded_best
from ttpu_train.export import export_run
from ttpu_train.runner import CheckpointPolicy, StepSettings


@pytest.fixture
def runner() -> NumpyTrainRunner:
    return NumpyTrainRunner(BigramModel(3), StepSettings())


def store(runner: NumpyTrainRunner, run: Path, **policy: Any) -> Checkpoints:
    return Checkpoints(runner, run / "checkpoints", CheckpointPolicy(**policy))


def save(one: Checkpoints, runner: NumpyTrainRunner, *steps: int, **more: Any) -> None:
    """Save checkpoints whose arrays hold their step."""
    for step in steps:
        runner.loaded.table[:] = step
        one.save(step, {"position": step}, wait=True, **more)


def change(place: Path, **fields: Any) -> None:
    header = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps(header | fields))


def damage(place: Path) -> None:
    (place / "table.npy").write_bytes(b"")


def names(run: Path) -> list[str]:
    return sorted(one.name for one in (run / "checkpoints").iterdir())


def test_nothing_is_made_or_deleted_before_the_first_save(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    assert store(runner, tmp_path / "nowhere").steps() == ()
    assert not (tmp_path / "nowhere").exists()
    other = tmp_path / "run" / "checkpoints" / ".unfinished-7"  # of a run that is saving
    other.mkdir(parents=True)
    save(store(runner, tmp_path / "run2"), runner, 1)
    reading = store(runner, tmp_path / "run")
    with pytest.raises(CheckpointError, match="it has none"):
        reading.restore()
    assert other.is_dir()
    save(reading, runner, 1)
    assert names(tmp_path / "run") == ["1"]


def test_a_damaged_checkpoint_is_put_aside_and_its_step_is_written_anew(
    runner: NumpyTrainRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(store(runner, tmp_path), runner, 2, 4, 6)
    damage(tmp_path / "checkpoints" / "6")
    (tmp_path / "checkpoints" / "4" / "trainer.json").unlink()
    one = store(runner, tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"its files are damaged \(ValueError: table.npy has 0 bytes of"):
        one.restore(6)
    assert names(tmp_path) == ["2", "4", "6"]
    assert one.restore() == {"position": 2} and runner.step_count == 2 and (runner.loaded.table == 2).all()
    assert names(tmp_path) == ["2", "4.damaged", "6.damaged"]
    assert "6 is damaged" in caplog.text and "4 is damaged" in caplog.text
    save(one, runner, 4, 6)
    assert names(tmp_path) == ["4", "4.damaged", "6", "6.damaged"]
    assert store(runner, tmp_path).restore() == {"position": 6}


def test_files_of_another_size_and_a_header_of_another_step_are_damage(
    runner: NumpyTrainRunner, tmp_path: Path
) -> None:
    save(store(runner, tmp_path), runner, 1)
    place = tmp_path / "checkpoints" / "1"
    with (place / "trainer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"damaged \(ValueError: trainer.json has 16 bytes of 15"):
        store(runner, tmp_path).restore()
    place.rename(place.with_name("3"))
    (place.with_name("3") / "trainer.json").write_text('{"position": 1}')
    with pytest.raises(CheckpointError, match="it says that it is of step 1"):
        store(runner, tmp_path).restore()


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, flushed = tmp_path / "checkpoints" / "1", list[tuple[str, bool]]()
    monkeypatch.setattr(checkpoints, "_to_disk", lambda path: flushed.append((path.name, place.exists())))
    save(store(runner, tmp_path), runner, 1)
    before = {name for name, is_there in flushed if not is_there}
    assert before == {"run.json", "trainer.json", "table.npy", "config.json", "model", ".unfinished-1"}
    assert flushed[-1] == ("checkpoints", True)


def test_where_none_can_be_read_none_is_renamed(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    save(store(runner, tmp_path), runner, 1, 2)
    for step in "12":
        damage(tmp_path / "checkpoints" / step)
    with pytest.raises(CheckpointError, match=r"checkpoints/1 was to be restored, but its files are damaged"):
        store(runner, tmp_path).restore()
    assert names(tmp_path) == ["1", "2"]


def test_checkpoints_beside_are_not_counted_and_not_deleted(
    runner: NumpyTrainRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    save(store(runner, tmp_path), runner, 3, 5, 9)
    for step in "35":
        change(folder / step, backend="jax")
    (folder / "4").mkdir()
    (folder / "notes").mkdir()
    one = store(runner, tmp_path, keep=1)
    save(one, runner, 4, 5, 6)  # 9 is a later step, which this run did not write
    assert names(tmp_path) == ["3", "4.other", "5.other", "6", "9", "notes"]
    assert "5 was not written by this run's backend and is now" in caplog.text
    with pytest.raises(CheckpointError, match="another backend wrote it, 'jax': train on with that backend"):
        one.restore(3)


def test_a_step_that_is_saved_again_replaces_its_checkpoint(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    one = store(runner, tmp_path, keep=1)
    save(one, runner, 5)
    runner.loaded.table[:] = 7
    one.save(5, {"position": 7}, wait=True)
    runner.loaded.table[:] = 0
    assert one.restore() == {"position": 7} and (runner.loaded.table == 7).all()
    assert names(tmp_path) == ["5"]


def test_the_newest_and_the_best_stay(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    one = store(runner, tmp_path, keep=2, best_metric="eval_hits", greater_is_better=True)
    assert one.best_step() is None
    for step, value in enumerate((float("nan"), 3.0, 1.0, 2.0, None), 1):
        save(one, runner, step, metrics=None if value is None else {"eval_hits": value})
    assert one.steps() == (2, 5) and one.best_step() == 2  # the best counts
    save(one, runner, 6, metrics={"eval_hits": 4.0})
    assert one.steps() == (5, 6)
    alone = store(runner, tmp_path, keep=1, best_metric="eval_hits", greater_is_better=True)
    save(alone, runner, 7)
    assert alone.steps() == (6, 7)  # the newest and the best stay in any case
    save(store(runner, tmp_path, keep=1), runner, 8)
    assert names(tmp_path) == ["8"]


def test_a_recorded_best_counts_until_the_next_save(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    one = store(runner, tmp_path, best_metric="eval_hits", greater_is_better=True)
    for step, value in ((1, 2.0), (2, 1.0)):
        save(one, runner, step, metrics={"eval_hits": value})
    folder = tmp_path / "checkpoints"

    def exported(step: int | None = None) -> int:
        return export_run(tmp_path, tmp_path / "out", NumpyBackend(), step=step, dtype="float32")

    assert recorded_best(folder) is None and exported() == 2
    one.record_best(1)
    assert recorded_best(folder) == BestCheckpoint(1, "eval_hits", 2.0) and one.steps() == (1, 2)
    assert exported() == 1 and exported(2) == 2
    shutil.rmtree(folder / "1")
    assert recorded_best(folder) is None
    (folder / "best.json").write_text("{")
    assert exported() == 2
    save(store(runner, tmp_path), runner, 3)
    assert names(tmp_path) == ["2", "3"]


def test_a_save_that_fails_leaves_the_earlier_ones(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store(runner, tmp_path, keep=1)
    save(one, runner, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where in ("_to_disk", "_link"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ttpu_train.checkpoints.{where}", full)
            with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are whole"):
                save(one, runner, 2)
        assert names(tmp_path) == ["1"]
    with monkeypatch.context() as patch:
        patch.setattr(NumpyFiles, "write_model", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(store(runner, tmp_path), runner, 2)
    assert one.restore() == {"position": 1}
    with pytest.raises(RequestError, match="that is no JSON"):
        one.save(2, {"position": object()})
    save(one, runner, 2)
    assert names(tmp_path) == ["2"]
    assert not (tmp_path / ".unfinished-model").exists()


def test_another_models_or_optimizers_checkpoint_is_refused(runner: NumpyTrainRunner, tmp_path: Path) -> None:
    save(store(runner, tmp_path), runner, 1)
    with pytest.raises(CheckpointError, match="it is of another model"):
        store(NumpyTrainRunner(BigramModel(4), StepSettings()), tmp_path).restore()
    change(tmp_path / "checkpoints" / "1", state="of lion")
    with pytest.raises(CheckpointError, match="holds the state of another optimizer"):
        store(runner, tmp_path).restore()
    change(tmp_path / "checkpoints" / "1", format=1)
    with pytest.raises(CheckpointError, match="has format 1, but this version reads 2"):
        store(runner, tmp_path).restore()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["mp_rank_00_model_states.pt"], "a checkpoint of DeepSpeed"),
        (["global_step3/mp_rank_00_model_states.pt", "latest"], "a folder with checkpoints of DeepSpeed"),
        (["trainer_state.json", "model.safetensors", "optimizer.pt"], "a checkpoint of transformers' Trainer"),
        (["checkpoint-500/trainer_state.json"], "a folder with checkpoints of transformers' Trainer"),
        (["random_states_0.pkl", "model.safetensors"], "a state that accelerate saved"),
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "a checkpoint of orbax that another program wrote"),
        (["default/manifest.ocdbt"], "a checkpoint of orbax that another program wrote"),
        (["adapter_config.json"], "an adapter of peft"),
        (["config.json", "model-00001-of-00002.safetensors"], "a model without optimizer state"),
        (["model.pt"], "a folder with files of torch.save"),
    ],
)
def test_checkpoints_of_other_programs_are_named(
    runner: NumpyTrainRunner, tmp_path: Path, files: list[str], words: str
) -> None:
    for name in files:
        file = tmp_path / "checkpoints" / "500" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"but it is {words}"):
        store(runner, tmp_path).restore()
    with pytest.raises(CheckpointError, match=f"there is none; .* is {words}"):
        export_run(tmp_path / "checkpoints" / "500", tmp_path / "out", NumpyBackend())


def test_an_export_has_the_config_that_the_checkpoint_was_trained_with(
    runner: NumpyTrainRunner, tmp_path: Path
) -> None:
    model, users = tmp_path / ".model", tmp_path / "model"
    for folder, names in ((model, ("config.json", "old.txt")), (users, ("config.json", "model.safetensors"))):
        folder.mkdir(parents=True)
        for name in names:  # of an earlier run in this folder, and of the user
            (folder / name).write_text("another model")
    save(store(runner, tmp_path), runner, 1)
    assert [file.name for file in model.iterdir()] == ["config.json"]
    assert {file.read_text() for file in users.iterdir()} == {"another model"} and len(list(users.iterdir())) == 2
    shutil.rmtree(model)
    one = store(runner, tmp_path)
    save(one, runner, 2)
    (model / "config.json").unlink()
    save(one, runner, 3)
    for step in (1, 3):
        assert export_run(tmp_path, tmp_path / "out", NumpyBackend(), step=step, dtype="float32") == step
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"vocab": 3}
        assert (np.load(tmp_path / "out" / "table.npy") == step).all()


@pytest.mark.parametrize(
    ("run", "out", "words"),
    [
        ("nowhere", "out", "there is no such folder"),
        ("file", "out", "there is none; .*/file is a file"),
        ("run/checkpoints/1", "out", "there is none"),
        ("run", "run", "is a folder of the run itself"),
        ("run", "run/checkpoints/1", "is a folder of the run itself"),
        ("run", "file/out", "that folder cannot be made"),
    ],
)
def test_an_export_from_or_to_a_wrong_folder_is_refused(
    runner: NumpyTrainRunner, tmp_path: Path, run: str, out: str, words: str
) -> None:
    save(store(runner, tmp_path / "run"), runner, 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises((CheckpointError, RequestError), match=words):
        export_run(tmp_path / run, tmp_path / out, NumpyBackend())


def test_an_export_that_is_refused_leaves_no_folder(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RequestError("it trained no adapters: leave --merge out.")

    save(store(runner, tmp_path / "run"), runner, 1)
    monkeypatch.setattr(NumpyBackend, "export_checkpoint", refuse)
    (tmp_path / "there").mkdir()
    for out in ("new/out", "there"):
        with pytest.raises(RequestError, match="no adapters"):
            export_run(tmp_path / "run", tmp_path / out, NumpyBackend(), merge=True)
    assert not (tmp_path / "new").exists() and (tmp_path / "there").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # of safetensors
    ],
)
def test_an_export_to_a_full_disk_is_told_in_one_sentence(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    save(store(runner, tmp_path / "run"), runner, 1)
    monkeypatch.setattr(NumpyBackend, "export_checkpoint", fail)
    with pytest.raises(CheckpointError, match=r"written to .*out, .* \(No space left on device\): make room"):
        export_run(tmp_path / "run", tmp_path / "out", NumpyBackend())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run/checkpoints/1/model/config.json", r"1 was to be exported, but its files are damaged \(FileNotFound"),
        (None, r"1 was to be exported, but its files are damaged \(FileNotFound"),
        ("out/config.json", r"written to .*out, but that failed \(FileNotFoundError: .*: make room, or name another"),
        ("base/model.safetensors", r"a file that it needs cannot be read \(FileNotFoundError: .*: bring that file"),
    ],
)
def test_an_export_tells_errors_of_reading_from_those_of_writing(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", *([] if name is None else [str(tmp_path / name)]))

    save(store(runner, tmp_path / "run"), runner, 1)
    monkeypatch.setattr(NumpyBackend, "export_checkpoint", fail)
    with pytest.raises(CheckpointError, match=words):
        export_run(tmp_path / "run", tmp_path / "out", NumpyBackend())


def test_an_export_of_a_config_that_is_no_json_is_of_a_damaged_checkpoint(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store(runner, tmp_path / "run"), runner, 1)
    monkeypatch.setattr(NumpyBackend, "export_checkpoint", lambda *_, **__: json.loads("{"))
    with pytest.raises(CheckpointError, match="its files are damaged"):
        export_run(tmp_path / "run", tmp_path / "out", NumpyBackend())


def test_an_export_of_a_damaged_checkpoint_or_of_a_missing_step_is_refused(
    runner: NumpyTrainRunner, tmp_path: Path
) -> None:
    save(store(runner, tmp_path), runner, 1, 2)
    damage(tmp_path / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match=r"its files are damaged \(ValueError: table.npy has 0 bytes"):
        export_run(tmp_path, tmp_path / "out", NumpyBackend())
    with pytest.raises(CheckpointError, match=r"there are those of \[1, 2\]: name"):
        export_run(tmp_path, tmp_path / "out", NumpyBackend(), step=3)
    change(tmp_path / "checkpoints" / "1", backend="jax")
    with pytest.raises(CheckpointError, match="another backend wrote it, 'jax': name that with --backend"):
        export_run(tmp_path, tmp_path / "out", NumpyBackend(), step=1)


class Killed(BaseException):
    """Nothing that follows runs."""


def test_a_save_in_place_of_another_may_be_killed_at_any_moment(
    runner: NumpyTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnce:
        def __init__(self, target: Any, args: Any, name: str) -> None:
            self.start = lambda: target(*args)

        def join(self) -> None: ...

    monkeypatch.setattr(checkpoints, "Thread", AtOnce)
    save(store(runner, tmp_path), runner, 5)
    found, renamed = [], Path.rename
    for moment in range(1, 9):
        calls: list[Path] = []

        def rename(path: Path, target: Path, calls: list[Path] = calls, moment: int = moment) -> Path:
            calls.append(path)
            if len(calls) == moment:
                raise Killed
            return renamed(path, target)

        runner.loaded.table[:] = moment
        before = found[-1] if found else 5
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(Path, "rename", rename)
            store(runner, tmp_path).save(5, {}, wait=True)
        again = store(runner, tmp_path)
        assert again.steps() == (5,)
        again.restore()
        found.append(int(runner.loaded.table[0, 0]))
        assert found[-1] in (before, moment)
        if len(calls) < moment:
            break
    assert found == [5, 5, 3, 4]  # renamed: the old one aside, the new one there, the old one to be deleted
    assert names(tmp_path) == ["5"]


def test_only_the_checkpoint_that_was_saved_last_stays(
    runner: NumpyTrainRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(store(runner, tmp_path), runner, 4, 9)
    change(tmp_path / "checkpoints" / "4", backend="other")
    save(store(runner, tmp_path, keep=1, last_saved_alone=True), runner, 5)
    assert names(tmp_path) == ["4.other", "5"] and "4.other" in caplog.text
