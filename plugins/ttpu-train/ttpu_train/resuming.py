"""Resumes a run, and compares its arguments with those that its checkpoint was written with. A checkpoint keeps those
that change what updates compute."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import RequestError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.checkpoints import CHECKPOINTS, TRAINER, Checkpoints, steps_in
from ttpu_train.foreign import kind_of
from ttpu_train.runner import CheckpointPolicy, TrainRunner

if TYPE_CHECKING:
    from ttpu_train.run import TrainingRun

logger = logging.getLogger(__name__)

SAME_UPDATES = (
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "gradient_checkpointing", "remat", "zero_stage", "parallelism_strategy",
    "plan", "pipeline_schedule",
    "peft_config", "adapter_name_or_path", "dataloader_num_workers", "logging_steps", "logging_first_step",
    "eval_strategy", "eval_steps", "eval_on_start", "save_strategy", "save_steps", "save_total_limit",
    "load_best_model_at_end", "report_to", "run_name", "disable_tqdm", "resume_from_checkpoint", "nan_limit",
    "eval_tasks", "eval_tasks_num_fewshot", "eval_tasks_limit", "eval_tasks_apply_chat_template",
    "eval_tasks_engine_options", "loss_spike_factor", "loss_spike_action", "profile_steps",
    "hung_step_factor", "hung_step_seconds",
)  # fmt: skip
"""Arguments that change no update, or that `rows` and `updates` or the checkpoint's identity tell of."""
ROWS, UPDATES, METHOD = "rows of an update", "updates of the run", "method"
SAID = {
    ROWS: "the same rows come next, but in other updates, so that the run is not the one that would have gone on",
    UPDATES: "the learning rate follows the new schedule from here on",
    "seed": "dropout and whatever else is random in an update differs",
    "dataloader_drop_last": "an epoch ends elsewhere",
    "metric_for_best_model": "the best checkpoint is looked for anew",
}
"""What a change means, where its name does not say it."""
BEST = ("metric_for_best_model", "greater_is_better")


def kept_arguments(
    args: TrainingArguments, method: str, own: Mapping[str, Any], rows: int, updates: int
) -> dict[str, Any]:
    """What a checkpoint keeps of a run's arguments, as JSON.

    Args:
        args: of the run.
        method: sft, dpo, ...
        own: the method's own arguments that were given.
        rows: of one update, over all processes.
        updates: of the whole run.
    """
    kept = {one.name: getattr(args, one.name) for one in fields(args) if one.name not in SAME_UPDATES}
    return {
        METHOD: method,
        ROWS: rows,
        UPDATES: updates,
        **{name: _plain(value) for name, value in {**own, **kept}.items()},
    }


def compare(saved: Mapping[str, Any], ours: Mapping[str, Any], *, tells: bool) -> frozenset[str]:
    """Warn of each argument that differs from the checkpoint's, in a line; return their names.

    Args:
        saved: what `kept_arguments` gave when the checkpoint was written.
        ours: the same of this run.
        tells: whether this process warns.

    Raises:
        RequestError: another method: what the checkpoint's optimizer state is of is not minimized any more.
    """
    if saved.get(METHOD, ours[METHOD]) != ours[METHOD]:
        raise RequestError(
            f"a run with method={saved[METHOD]!r} was to be resumed with method={ours[METHOD]!r}, which minimizes "
            "something else: resume with the former, or export its checkpoint and start a new run from that."
        )
    changed = {name: (saved[name], ours.get(name)) for name in saved if saved[name] != ours.get(name)}
    changed |= {name: (None, ours[name]) for name in ours if name not in saved and ours[name] is not None}
    for name, (old, new) in changed.items() if tells else ():
        said = f"; {SAID[name]}" if name in SAID else ""
        logger.warning("resumed with other arguments than the checkpoint's: %s %s → %s%s", name, old, new, said)
    return frozenset(changed)


def _plain(value: Any) -> Any:
    """A value as JSON reads it back."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return getattr(value, "__name__", type(value).__name__)


def refuse_earlier_run(output_dir: Path) -> None:
    """Refuse a folder that has a run, where another is to begin.

    Raises:
        RequestError: it has checkpoints.
    """
    steps = steps_in(output_dir / CHECKPOINTS)
    if steps:
        raise RequestError(
            f"a run was to begin in {output_dir}, but that has checkpoints of an earlier one (newest: {steps[-1]:,}): "
            "pass resume_from_checkpoint=True to go on from it, or another output_dir."
        )


def saved_learning_rate(resume: bool | str | Path, output_dir: Path) -> float | None:
    """The learning rate that the checkpoint to resume was written with; None if there is none to read.

    Args:
        resume: True for the newest, or the folder of one.
        output_dir: of the run.
    """
    if resume is True:
        ours = output_dir / CHECKPOINTS
        places = [ours / str(step) for step in reversed(steps_in(ours))]
    else:
        places = [Path(str(resume)).expanduser()]
    for place in places:
        try:
            found = json.loads((place / TRAINER).read_text(encoding="utf-8"))["arguments"]["learning_rate"]
        except (OSError, ValueError, KeyError, TypeError):  # damaged, or of another program
            continue
        return float(found) if isinstance(found, int | float) else None
    return None


def resume_run(
    run: TrainingRun, store: Checkpoints, resume: bool | str | Path, output_dir: Path, runner: TrainRunner
) -> bool:
    """Restore the newest checkpoint, or the one that was named; False if there is none.

    Args:
        run: that goes on.
        store: the checkpoints of `output_dir`.
        resume: True for the newest, or the folder of one.
        output_dir: of the run.
        runner: whose state is restored.

    Raises:
        RequestError: the folder is no checkpoint, is followed by newer ones of this run, or is of another run where
            this one has some.
        CheckpointError: it cannot be read.
    """
    ours, steps = (output_dir / CHECKPOINTS).resolve(), store.steps()
    if resume is True:
        if not steps:
            kind = kind_of(output_dir)
            if kind is not None and kind.startswith("a folder with checkpoints"):
                raise RequestError(
                    f"resume_from_checkpoint=True was given, but {output_dir} is {kind}, which cannot be "
                    "resumed here: begin a new run from that model's weights in another output_dir."
                )
            warnings.warn(
                f"resume_from_checkpoint=True was asked for, but {ours} has no checkpoint: the run begins anew",
                stacklevel=3,
            )
            return False
        run.resume(dict(store.restore()))
        return True
    folder = Path(str(resume)).expanduser().resolve()
    step = int(folder.name) if folder.name.isdecimal() else -1
    if not folder.is_dir() or step < 0:
        of_run = "the output_dir of a run, whose checkpoints are in its folder checkpoints"
        kind = kind_of(folder) or (of_run if (folder / CHECKPOINTS).is_dir() else "no checkpoint")
        raise RequestError(
            f"resume_from_checkpoint={str(resume)!r} was given, but that is {kind}; those of this run are "
            f"{', '.join(str(ours / str(one)) for one in steps) or f'none in {ours}'}: name one, or True for the "
            "newest."
        )
    if folder.parent == ours:
        newer = [one for one in steps if one > step]
        if newer:
            raise RequestError(
                f"resume_from_checkpoint={str(resume)!r} was given, but this run has newer checkpoints "
                f"({', '.join(map(str, newer))}), which would be mixed up with those to come: give another "
                "output_dir, or remove them."
            )
        run.resume(dict(store.restore(step)))
        return True
    if steps:
        raise RequestError(
            f"resume_from_checkpoint={str(resume)!r} was given, but that is of another run, and {ours} has checkpoints "
            f"of its own ({', '.join(map(str, steps))}), with which those to come would be mixed up: give another "
            "output_dir, or True to go on from the newest of these."
        )
    other = Checkpoints(runner, folder.parent, CheckpointPolicy())
    try:
        run.resume(dict(other.restore(step)))
    finally:
        other.close()
    return True
