"""`ttpu train` trains a model as a file says."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import counted, in_bytes, note, print_facts, print_json, warnings_as_lines

if TYPE_CHECKING:
    from ttpu_train.config_file import TrainingFile
    from ttpu_train.trainer import TrainOutput


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A .yaml or .json file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the file, as in max_steps=20.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compile the update for --topology, and train nothing.")
    ] = False,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --dry-run: a TPU slice that need not be there, as in v5e:4x4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Train a model on text, chats or token ids.

    The file holds the arguments of ttpu.Trainer: model, train_dataset, eval_dataset, and the fields of
    TrainingArguments, whose names are transformers'. method is sft, grpo (samples completions and trains on their
    rewards), dpo, orpo or kto (preferences), reward (makes a reward model), or distill (learns from a teacher). A run
    keeps checkpoints, its log (log.jsonl) and a picture of it in output_dir. Ctrl-C and SIGTERM save a checkpoint and
    end with status 130 or 143; resume=true goes on from the newest.

    Examples:

    \b
      ttpu train examples/train/pydoc.yaml max_steps=20
      ttpu train run.yaml output_dir=./run learning_rate=1e-4 parallelism_strategy=fsdp
      ttpu train run.yaml output_dir=./run resume=true
      ttpu train run.yaml --dry-run --topology v5e:4x4
      ttpu train examples/train/grpo.yaml
      ttpu train examples/train/distill.yaml max_steps=20

    \f
    Raises:
        RequestError: --dry-run without --topology, or the other way round.
    """
    from ttpu_core.errors import RequestError
    from ttpu_train.config_file import read_training_file
    from ttpu_train.trainer import Trainer

    asked = read_training_file(config, changes or ())
    if dry_run != (topology is not None):
        raise RequestError(
            f"{'--dry-run' if dry_run else '--topology'} was given without "
            f"{'--topology' if dry_run else '--dry-run'}, but they belong together: pass both, as in --dry-run "
            "--topology v5e:4x4."
        )
    if topology is not None:
        _compile(asked, topology, as_json=as_json)
        return
    with plain_warnings():
        trainer = Trainer(**asked.trainer, args=resumed_if_restarted(asked.arguments))
        output = trainer.train()
    folder, is_first = trainer.args.folder, trainer.state.is_world_process_zero
    if as_json and is_first:
        print_json({"global_step": output.global_step, **output.metrics, "output_dir": str(folder)})
    words = what_is_left(output, folder, is_saved=trainer.args.save_strategy != "no")
    if output.stopped_by is not None:
        if is_first:
            note(words)
        raise typer.Exit(exit_code(output.stopped_by))
    if not as_json and is_first:
        print(words)


def what_is_left(output: TrainOutput, folder: Path, *, is_saved: bool) -> str:
    """What is said at the end of a run.

    Args:
        output: of `Trainer.train`.
        folder: the run's output_dir.
        is_saved: whether the run wrote checkpoints.
    """
    from ttpu_train.checkpoints import CHECKPOINTS, recorded_best

    steps, nothing = f"{output.global_step:,}", "save_strategy=no left no checkpoint"
    if output.stopped_by is not None:
        more = "the same command with resume=true goes on from there" if is_saved else nothing
        return f"stopped by {output.stopped_by} after step {steps}: {more}."
    loss = "none of them now" if math.isnan(output.training_loss) else f"loss {output.training_loss:.4f}"
    which = "the model" if output.best_step is None else f"the best model, of update {output.best_step:,}"
    is_chosen = output.best_step is None or recorded_best(folder / CHECKPOINTS) is not None
    step = "" if is_chosen else f" --step {output.best_step}"
    more = f"`ttpu export {folder} --out DIR{step}` writes {which}" if is_saved else nothing
    return f"{folder}: {steps} updates, {loss}; {more}"


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings, and what the trainer logs as one, as lines for people, without the place in the code."""
    logger, handler = logging.getLogger("ttpu_train"), _Lines(logging.WARNING)
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False  # a handler of another library's would print the line again
    try:
        with warnings_as_lines():
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


class _Lines(logging.Handler):
    """Prints each record as a line: its level, then its words."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}")


def exit_code(stopped_by: str) -> int:
    """128 and the number of the signal, as a shell says it: 143 for SIGTERM, 130 for Ctrl-C."""
    return 128 + signal.Signals.__members__.get(stopped_by, signal.SIGTERM)  # another process heard: all are ended


def resumed_if_restarted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with resume_from_checkpoint=True if `ttpu launch --restarts` has started this process again and
    the run has a checkpoint."""
    from ttpu_core.processes import is_restarted
    from ttpu_train.arguments import TrainingArguments
    from ttpu_train.checkpoints import CHECKPOINTS, steps_in

    given = arguments.get("output_dir", TrainingArguments.output_dir)
    if not is_restarted() or not isinstance(given, str | Path) or not steps_in(Path(given).expanduser() / CHECKPOINTS):
        return dict(arguments)
    return {**arguments, "resume_from_checkpoint": True}


def _predicted(found: Mapping[str, Any]) -> str:
    """What the planner predicts of the memory, and its ratio to what the compiler says."""
    if found["plan_bytes"] is None:
        return str(found["plan_note"])
    peak, held = (
        f"{in_bytes(found[f'plan_{name}'])} ({found[f'plan_{name}'] / found[of_compiler]:.3f} of the compiler's)"
        for name, of_compiler in (("bytes", "peak_bytes"), ("held_bytes", "held_bytes"))
    )
    return f"{peak} at the peak, {held} of it master weights and optimizer state"


def _compile(asked: TrainingFile, topology: str, *, as_json: bool) -> None:
    """Compile the update of a run and print the compiler's figures."""
    from ttpu_train.dry_run import dry_run

    with plain_warnings():
        found = dry_run(asked, topology)
    if as_json:
        print_json(found)
        return
    memory = (
        f"{in_bytes(found['peak_bytes'])} of {in_bytes(found['hbm_bytes'])} at the peak, "
        f"{in_bytes(found['held_bytes'])} of it master weights and optimizer state"
    )
    time = (
        f"{found['seconds'] * 1e3:,.1f} ms an update (kernels at least {found['kernel_seconds'] * 1e3:,.1f}), "
        f"{found['tokens_per_second_per_device']:,.0f} tokens/s/device, MFU {found['mfu']:.1%}"
    )
    print_facts(
        [
            ("slice", [f"{found['topology']}, {counted(found['devices'], 'device')}, mesh {found['mesh']}"]),
            ("update", [f"{counted(found['rows'], 'row')} of {counted(found['length'], 'token')}"]),
            ("memory of a device", [memory]),
            ("memory by ttpu plan", [_predicted(found)]),
            ("predicted time", [time]),
            *(
                (name, [f"{found[key] * 1e3:,.1f} ms an update at an assumed rate, hidden or waited for"])
                for name, key in (("between slices", "dcn_seconds"), ("to and from the host", "host_seconds"))
                if found[key]
            ),
            ("compiled in", [f"{found['compile_seconds']:,.0f} s; nothing ran on a TPU"]),
        ]
    )
