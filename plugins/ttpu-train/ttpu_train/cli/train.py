"""`ttpu train` trains a model as a file says."""

from __future__ import annotations

from typing import Annotated

import typer

from ttpu_core.cli.console import note, print_json

INTERRUPTED = 130


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A .yaml or .json file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the file, as in max_steps=20.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Train a model on text, chats or token ids.

    The file holds the arguments of ttpu.Trainer: model, train_dataset, eval_dataset, and the fields of
    TrainingArguments, whose names are transformers'. A run keeps checkpoints, its log (log.jsonl) and a picture of it
    in output_dir. Ctrl-C and SIGTERM save a checkpoint first; resume=true goes on from the newest.

    Examples:

    \b
      ttpu train examples/train/pydoc.yaml max_steps=20
      ttpu train run.yaml output_dir=./run learning_rate=1e-4 parallelism_strategy=fsdp
      ttpu train run.yaml output_dir=./run resume=true
    """
    from ttpu_train.config_file import read_training_file
    from ttpu_train.trainer import Trainer

    asked = read_training_file(config, changes or ())
    trainer = Trainer(**asked.trainer, args=asked.arguments)
    output = trainer.train()
    if not trainer.state.is_world_process_zero:
        return
    folder = trainer.args.folder
    if as_json:
        print_json({"global_step": output.global_step, **output.metrics, "output_dir": str(folder)})
    if output.stopped_by is not None:
        note(
            f"stopped by {output.stopped_by} after step {output.global_step:,}: the same command with resume=true "
            "goes on from there."
        )
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        print(
            f"{folder}: {output.global_step:,} updates, loss {output.training_loss:.4f}; `ttpu export {folder} --out "
            "DIR` writes the model"
        )
