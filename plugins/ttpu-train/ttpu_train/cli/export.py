"""`ttpu export` writes the weights of a training run as a Hugging Face checkpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import print_json


class DtypeChoice(StrEnum):
    """What weights are written in."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a training run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the checkpoint to write.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Of this update, in place of the best or the newest.")
    ] = None,
    dtype: Annotated[DtypeChoice, typer.Option(help="What weights are written in.")] = DtypeChoice.bfloat16,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run of adapters: write the base model with them merged.")
    ] = False,
    backend: options.Backend = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a training run's weights as a checkpoint that transformers, vLLM and ttpu load.

    The weights are those of the best checkpoint where load_best_model_at_end chose one at the end of the run, and else
    of the newest; --step names another.

    A run of adapters (peft_config) is written as an adapter that peft and the serving engine read, or with --merge as
    a checkpoint. It needs none of the devices that the run had.

    Examples:

    \b
      ttpu export ./run --out ./model
      ttpu export ./run --step 500 --out ./model-500 --dtype float32
      ttpu export ./lora-run --merge --out ./model
    """
    from ttpu_train.checkpoints import CHECKPOINTS, recorded_best
    from ttpu_train.export import export_run
    from ttpu_train.inputs import training_backend

    runs = training_backend(backend)
    best = recorded_best(run.expanduser() / CHECKPOINTS)
    step = best.step if step is None and best is not None else step
    written = export_run(run.expanduser(), out.expanduser(), runs, step=step, dtype=dtype.value, merge=merge)
    is_best = best is not None and written == best.step
    if as_json:
        print_json({"folder": str(out), "step": written, "dtype": dtype.value, "is_best": is_best})
    else:
        chosen = "" if best is None or not is_best else f", the best of the run by {best.metric} ({best.value:.4g})"
        print(f"{out}: the weights after update {written:,}{chosen}, in {dtype.value}")
