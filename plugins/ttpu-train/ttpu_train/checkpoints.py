"""The checkpoints of a run: folders with the numbers of updates as names, each whole or not there. A backend writes and
reads arrays; naming, committing, keeping, choosing the best and passing over damaged ones are the same for all."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.files import first_line, write_whole
from ttpu_train.foreign import kind_of
from ttpu_train.runner import CheckpointPolicy, TrainRunner
from ttpu_train.tokenizer_files import replace_tokenizer

logger = logging.getLogger(__name__)

FORMAT = 2
"""The version of what a checkpoint holds."""
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its output_dir."""
HEADER, TRAINER = "run.json", "trainer.json"
"""What a checkpoint says of itself, and what the trainer gave."""
MODEL, KEPT_MODEL = "model", ".model"
"""The folders with the model's config and tokenizer: of each checkpoint, and beside the folder of
checkpoints, to which theirs are hard links."""
BEST = "best.json"
"""The file beside the checkpoints that records which of them a run chose at its end."""
UNFINISHED = ".unfinished-"
"""Before the number of a checkpoint that is being written, or deleted."""
REPLACED = ".replaced-"
"""Before the number of a checkpoint that another takes the place of."""
DAMAGED, OTHER = "damaged", "other"
"""The endings of folders that a damaged checkpoint, or another run's in the way, is renamed to."""


def steps_in(folder: Path) -> tuple[int, ...]:
    """The steps of the checkpoints in a folder, in order; none if it is not there. A checkpoint that a killed run was
    about to replace is there again.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        for replaced in folder.glob(f"{REPLACED}*"):
            if not (place := folder / replaced.name.removeprefix(REPLACED)).exists():
                with suppress(FileNotFoundError):  # another process did it
                    replaced.rename(place)
        names = [one.name for one in folder.iterdir() if one.is_dir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} were asked for, but it cannot be read ({error.strerror}): make it a readable "
            "folder, or name another."
        ) from error
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name))


def read_header(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, after a comparison of its files' sizes.

    Raises:
        CheckpointError: it is another program's, or of another version.
        OSError, ValueError, KeyError, TypeError: it is damaged: a file is missing, or not as long as it was.
    """
    if not (place / HEADER).is_file():
        kind = kind_of(place)
        if kind is not None:
            raise CheckpointError(
                f"the checkpoint {place} was to be read, but it is {kind}: name a checkpoint of ttpu's trainer, "
                "such as output_dir/checkpoints/500, or give a model's folder as `model`."
            )
    header: dict[str, Any] = json.loads((place / HEADER).read_text(encoding="utf-8"))
    if header["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint {place} has format {header['format']!r}, but this version reads {FORMAT!r}: use the "
            "version that wrote it."
        )
    for name, size in header["files"].items():
        found = (place / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found:,} bytes of {size:,}")
    return header


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint that a run chose at its end.

    Attributes:
        step: updates before it was written.
        metric: the name of the metric that it is the best by.
        value: of the metric.
    """

    step: int
    metric: str
    value: float


def recorded_best(folder: Path) -> BestCheckpoint | None:
    """The checkpoint in a folder that a run chose as the best at its end. None if it chose none, if it was resumed and
    saved others since, or if that checkpoint is not there any more."""
    try:
        found = json.loads((folder / BEST).read_text(encoding="utf-8"))
        best = BestCheckpoint(int(found["step"]), str(found["metric"]), float(found["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return best if best.step in steps_in(folder) else None


class Checkpoints:
    """The checkpoints of one run in one folder. Nothing is made or deleted there before the first save. Every process
    of a run has one, and makes the same calls in the same order.

    Args:
        runner: whose state is saved and restored.
        folder: of the checkpoints; config and tokenizer are written beside it at the first save.
        policy: which checkpoints stay.
        tokenizer: that the run was given; None keeps the one that the model came with.
    """

    def __init__(
        self, runner: TrainRunner, folder: Path, policy: CheckpointPolicy, tokenizer: Any = None
    ) -> None:
        self._runner, self._folder, self._policy = runner, folder.resolve(), policy
        self._tokenizer = tokenizer
        self._files = runner.checkpoint_files()
        self._writes = runner.layout.process_index == 0
        self._is_ready = False
        self._thread: Thread | None = None
        self._failed: Exception | None = None

    def save(
        self, step: int, trainer: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        """Write the runner's state after update number `step`, in the background unless `wait`. A checkpoint of the
        same step by the same backend is replaced; another one is renamed.

        Args:
            step: updates so far.
            trainer: what JSON holds: data position, counters, log history.
            metrics: of an evaluation, from which the best is chosen.
            wait: return when the checkpoint is committed.

        Raises:
            CheckpointError: this save or the one before failed, as by a full disk; earlier checkpoints are untouched.
            RequestError: JSON does not hold what the trainer gave.
        """
        self.wait()
        header = {
            "format": FORMAT,
            "backend": self._files.backend,
            "identity": self._files.identity(),
            "state": _digest(self._files.state_names()),
            "step": step,
            "metrics": dict(metrics or {}),
        }
        try:
            texts = {TRAINER: json.dumps(dict(trainer)), HEADER: json.dumps(header)}
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"a checkpoint was to hold what was given beside the weights, but that is no JSON ({error}): give "
                "numbers, texts, lists and mappings alone."
            ) from error
        self._together(self._prepare)
        unfinished = self._folder / f"{UNFINISHED}{step}"
        begun: list[Callable[[], None]] = []
        self._together(lambda: begun.append(self._files.write(unfinished)))
        self._thread = Thread(target=self._finish, args=(step, begun[0], texts), name="ttpu-checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints, in order, another backend's among them, when the save in the background is
        done.

        Raises:
            CheckpointError: that failed, or the folder cannot be read.
        """
        self.wait()
        return steps_in(self._folder)

    def best_step(self) -> int | None:
        """The step with the best metric, or None."""
        return self._best(self.steps())

    def record_best(self, step: int) -> None:
        """Record that the run ended with the weights of this checkpoint, for `recorded_best`. The next save deletes the
        record.

        Raises:
            CheckpointError: it cannot be written, as on a full disk.
        """

        def write() -> None:
            if self._writes:
                metric = self._policy.best_metric
                best = {"step": step, "metric": metric, "value": (self._header(step).get("metrics") or {}).get(metric)}
                write_whole(self._folder / BEST, json.dumps(best) + "\n")

        self._together(write)

    def restore(self, step: int | None = None) -> Mapping[str, Any]:
        """Put a checkpoint into the runner, whatever mesh and ZeRO stage wrote it, and return what the trainer gave.

        Args:
            step: None takes the newest that is whole, with a warning for each newer one that is damaged. Those are
                renamed, so that they are not counted any more.

        Raises:
            CheckpointError: none is there, it is damaged, or it is another model's, backend's or program's.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{'a checkpoint' if step is None else f'the checkpoint of step {step}'} was to be restored from "
                f"{self._folder}, but {f'it has those of {list(steps)}' if steps else 'it has none'}: use the folder "
                "and the step of a whole one."
            )
        passed_over: list[Path] = []
        for candidate in (step,) if step is not None else reversed(steps):
            place = self._folder / str(candidate)
            found, error = self._tried(place, candidate)
            if not self._runner.any_process(error is not None):
                for damaged in passed_over if self._writes else ():  # only now: if none can be read, files are whole
                    try:
                        _put_aside(damaged, DAMAGED)
                    except OSError as refused:
                        logger.warning("%s cannot be renamed (%s)", damaged, first_line(refused))
                self._runner.any_process(False)  # all see the folder as it is now
                return found
            reason = "another process cannot read it" if error is None else first_line(error)
            if step is not None or candidate == steps[0]:
                raise CheckpointError(
                    f"the checkpoint {place} was to be restored, but its files are damaged ({reason}): delete it and "
                    "restore another."
                ) from error
            logger.warning("the checkpoint %s is damaged (%s): the one before it is restored", place, reason)
            passed_over.append(place)
        raise AssertionError("a loop over checkpoints ended without one")

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._failed = self._failed, None
        if self._runner.any_process(error is not None):
            raise self._failure(error)

    def settle(self) -> None:
        """Wait for this process's part of the save in the background, after an error that ends the run: other processes
        may not be there any more."""
        if self._thread is not None:
            self._thread.join()
            if self._failed is not None:
                logger.warning("%s", self._failure(self._failed))
            self._thread = self._failed = None

    def close(self) -> None:
        """Wait for the save in the background, and release threads.

        Raises:
            CheckpointError: it failed.
        """
        try:
            self.wait()
        finally:
            self._files.close()

    # -- saving --

    def _together(self, call: Callable[[], object]) -> None:
        """Call in each process; if it fails in one, it fails in all.

        Raises:
            CheckpointError: it failed.
        """
        error = None
        try:
            call()
        except Exception as stopped:  # whatever stopped a save, as a full disk
            error = stopped
        if self._runner.any_process(error is not None):
            raise self._failure(error) from error

    def _failure(self, error: Exception | None) -> CheckpointError:
        reason = "in another process" if error is None else first_line(error)
        return CheckpointError(
            f"a checkpoint was to be written to {self._folder}, but that failed ({reason}): make room or use another "
            "folder; earlier checkpoints are whole."
        )

    def _prepare(self) -> None:
        """Before a save: make the folder, and delete the record of the best checkpoint, because the run goes on. Before
        the first one: delete what a killed run left of this one."""
        if not self._writes:
            return
        model = self._folder.parent / KEPT_MODEL
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            steps_in(self._folder)  # a checkpoint that was about to be replaced is there again
            for left in self._folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left)
        if not self._is_ready or not (model / "config.json").is_file():
            self._write_model(model)
        (self._folder / BEST).unlink(missing_ok=True)
        self._is_ready = True

    def _write_model(self, model: Path) -> None:
        """Write config and tokenizer. Files are replaced and not changed: those of checkpoints are the same inodes."""
        unfinished = model.with_name(f"{UNFINISHED}{MODEL}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            self._files.write_model(unfinished)
            if self._tokenizer is not None:
                replace_tokenizer(unfinished, self._tokenizer)
            model.mkdir(exist_ok=True)
            written = sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json")
            for old in model.iterdir():
                if old.is_file() and not (unfinished / old.name).exists():
                    old.unlink()
            for file in written:
                file.replace(model / file.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _finish(self, step: int, finish_arrays: Callable[[], None], texts: Mapping[str, str]) -> None:
        """Wait for the arrays of all processes, and commit; in a thread."""
        place = self._folder / f"{UNFINISHED}{step}"
        try:
            finish_arrays()
            if self._writes:
                self._commit(step, place, texts)
        except Exception as error:  # whatever stopped a save, as a full disk
            if self._writes:
                for left in self._folder.glob(f"{place.name}*"):
                    shutil.rmtree(left, ignore_errors=True)
            self._failed = error

    def _commit(self, step: int, unfinished: Path, texts: Mapping[str, str]) -> None:
        (unfinished / MODEL).mkdir()
        for file in (self._folder.parent / KEPT_MODEL).iterdir():
            _link(file, unfinished / MODEL / file.name)
        (unfinished / TRAINER).write_text(texts[TRAINER], encoding="utf-8")
        files = [file for file in unfinished.rglob("*") if file.is_file()]
        sizes = {file.relative_to(unfinished).as_posix(): file.stat().st_size for file in files}
        header = unfinished / HEADER
        header.write_text(json.dumps(json.loads(texts[HEADER]) | {"files": sizes}), encoding="utf-8")
        for path in (*files, header, *(one for one in unfinished.rglob("*") if one.is_dir()), unfinished):
            _to_disk(path)
        place, replaced = self._folder / str(step), self._folder / f"{REPLACED}{step}"
        if place.exists() and not self._is_ours(step):
            self._put_others_aside(place)
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            place.rename(replaced)
        unfinished.rename(place)
        _to_disk(self._folder)
        if replaced.exists():
            _delete(replaced)
        self._remove_old(step)

    def _put_others_aside(self, place: Path) -> None:
        aside = _put_aside(place, OTHER)
        logger.warning("%s was not written by this run's backend and is now %s", place, aside)

    def _remove_old(self, newest: int) -> None:
        """Delete what the policy does not keep. Another backend's or program's checkpoints are not counted, nor those
        of later steps than the newest save: the run did not write these."""
        if self._policy.last_saved_alone:
            for step in set(steps_in(self._folder)) - {newest}:
                place = self._folder / str(step)
                _delete(place) if self._is_ours(step) else self._put_others_aside(place)
            return
        if self._policy.keep is None:
            return
        steps = [step for step in steps_in(self._folder) if step <= newest and self._is_ours(step)]
        protected = {newest, self._best(steps)} - {None}
        others = [step for step in steps if step not in protected]
        for step in others[: max(0, len(steps) - max(self._policy.keep, len(protected)))]:
            _delete(self._folder / str(step))

    def _best(self, steps: Iterable[int]) -> int | None:
        metric, values = self._policy.best_metric, {}
        if metric is None:
            return None
        for step in steps:
            value = (self._header(step).get("metrics") or {}).get(metric)
            if isinstance(value, int | float) and math.isfinite(value):
                values[step] = value if self._policy.greater_is_better else -value
        return max(values, key=lambda step: values[step]) if values else None

    def _is_ours(self, step: int) -> bool:
        header = self._header(step)
        return header.get("format") == FORMAT and header.get("backend") == self._files.backend

    def _header(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself, or nothing."""
        try:
            found = json.loads((self._folder / str(step) / HEADER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # -- restoring --

    def _tried(self, place: Path, step: int) -> tuple[dict[str, Any], Exception | None]:
        """What the trainer gave, or why the checkpoint cannot be read.

        Raises:
            CheckpointError: it is another model's, backend's or program's.
        """
        try:
            header = read_header(place)
            check_backend(header, self._files.backend, place, "train on with that backend, or use another folder")
            self._files.check(header["identity"], place)
            if header["state"] != _digest(self._files.state_names()):
                raise CheckpointError(
                    f"the checkpoint {place} was to be restored, but it holds the state of another optimizer or of "
                    "other trained parameters: use the run's own optimizer and trainable patterns, or another folder."
                )
            trainer: dict[str, Any] = json.loads((place / TRAINER).read_text(encoding="utf-8"))
            if header["step"] != step:
                raise ValueError(f"it says that it is of step {header['step']}")
            self._files.read(place, step)
        except CheckpointError:
            raise
        except Exception as error:  # libraries raise many kinds for damaged files
            return {}, error
        return trainer, None


def check_backend(header: Mapping[str, Any], ours: str, place: Path, remedy: str) -> None:
    """Compare the backend that wrote a checkpoint with the one that is to read it.

    Raises:
        CheckpointError: it is another.
    """
    if header["backend"] != ours:
        raise CheckpointError(
            f"the checkpoint {place} was to be read by the backend {ours!r}, but another backend wrote it, "
            f"{header['backend']!r}: {remedy}."
        )


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()


def _put_aside(place: Path, ending: str) -> Path:
    """Rename a checkpoint, so that nothing is lost.

    Raises:
        OSError: it cannot be renamed.
    """
    aside, number = place.with_name(f"{place.name}.{ending}"), 1
    while aside.exists():
        number += 1
        aside = place.with_name(f"{place.name}.{ending}-{number}")
    return place.rename(aside)


def _delete(place: Path) -> None:
    """Rename a checkpoint before its files are deleted, so that a killed run leaves none with half of them."""
    going = place.with_name(f"{UNFINISHED}{place.name}-old")
    shutil.rmtree(going, ignore_errors=True)
    shutil.rmtree(place.rename(going))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copy2(file, target)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
