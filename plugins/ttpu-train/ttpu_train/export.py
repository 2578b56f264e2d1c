"""Writes a run's checkpoint as a model: chooses the checkpoint, and has the backend that wrote it write the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.files import DISK_FULL, first_line, names_other_file, writing_model
from ttpu_train.checkpoints import CHECKPOINTS, check_backend, read_header, recorded_best, steps_in
from ttpu_train.foreign import kind_of


def export_run(
    run: Path, out: Path, backend: Any, *, step: int | None = None, dtype: str = "bfloat16", merge: bool = False
) -> int:
    """Write a run's weights as a Hugging Face checkpoint, or its adapters in peft's format; return their step.

    Args:
        run: the run's output_dir.
        out: the folder to write.
        backend: that wrote the run's checkpoints.
        step: which checkpoint; None takes the one that the run chose as the best at its end, or else the newest.
        dtype: of the written weights.
        merge: of a run that trains adapters, write the base model with them merged.

    Raises:
        CheckpointError: no such checkpoint is there, it is damaged, or another backend's, or the disk is full.
        RequestError: `out` cannot be written to or is a folder of the run, or `merge` without adapters.
    """
    place = _chosen(run, step)
    try:
        header = read_header(place)
        check_backend(header, backend.name, place, "name that with --backend")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(place, error) from error
    with _target(out, run), writing_model(out), _reading(place):
        backend.export_checkpoint(place, out, identity=header["identity"], dtype=dtype, merge=merge)
    return int(header["step"])


def _chosen(run: Path, step: int | None) -> Path:
    """The folder of the checkpoint of a step; without a step of the one that the run chose, or of the newest.

    Raises:
        CheckpointError: it is not there.
    """
    folder = (run / CHECKPOINTS).resolve()
    steps = () if run.is_file() else steps_in(folder)
    if steps and step is None:
        best = recorded_best(folder)
        return folder / str(steps[-1] if best is None else best.step)
    if step in steps:
        return folder / str(step)
    kind = None if steps else kind_of(run)
    if steps:
        found = f"there are those of {list(steps)}"
    elif kind is not None:
        found = f"there is none; {run} is {kind}"
    elif run.is_dir():
        found = "there is none"
    else:
        found = "there is no such folder" if not run.exists() else "it is no folder"
    raise CheckpointError(
        f"{'the newest checkpoint' if step is None else f'the checkpoint of step {step}'} of {run} was to be exported, "
        f"but {found}: name the output_dir of a run of ttpu's trainer, and a step that is there."
    )


def _damaged(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {place} was to be exported, but its files are damaged ({first_line(error)}): export another "
        "step."
    )


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Tell errors of reading a checkpoint from those of writing the model.

    Raises:
        CheckpointError: the checkpoint is damaged.
        OSError: the disk is full, or it is an error of another file, as of the model.
    """
    try:
        yield
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        if first_line(error) in DISK_FULL or names_other_file(error, place):
            raise
        raise _damaged(place, error) from error


@contextmanager
def _target(out: Path, run: Path) -> Iterator[None]:
    """Make the folder to write. Folders that this makes are removed again if the export fails and writes nothing.

    Raises:
        RequestError: it cannot be made, or holds the run.
    """
    target, source = out.resolve(), run.resolve()
    if target == source or target.is_relative_to(source / CHECKPOINTS):
        raise RequestError(
            f"--out {out} was given, but that is a folder of the run itself, whose files would be mixed up with the "
            "model's: name another folder."
        )
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"--out {out} was given for the model, but that folder cannot be made ({error.strerror}): name another."
        ) from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one that holds something stays, and those above it
            for folder in made:
                folder.rmdir()
        raise
