"""Options that the commands of `ttpu bench` share, and their checks and conversions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import stderr_console
from ttpu_core.errors import RequestError
from ttpu_core.files import check_target, write_whole
from ttpu_serve.cli.engine_options import ENGINE

if TYPE_CHECKING:
    from ttpu_serve.bench.workload import Prompt

WORKLOAD, SENDING, SERVER, RESULTS = "Workload", "Sending", "Server", "Results"

InputTokens = Annotated[
    str, typer.Option(metavar="N|LOW-HIGH", help="Tokens of each prompt, drawn evenly.", rich_help_panel=WORKLOAD)
]
OutputTokens = Annotated[
    str, typer.Option(metavar="N|LOW-HIGH", help="The most tokens of each output.", rich_help_panel=WORKLOAD)
]
PrefixTokens = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Tokens that all prompts begin with, beyond these.", rich_help_panel=WORKLOAD
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts instead of random ones: .txt (one a line), .jsonl or .json with prompt, messages or ShareGPT's "
        "conversations.",
        rich_help_panel=WORKLOAD,
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of prompts and arrivals.", rich_help_panel=WORKLOAD)]
Percentiles = Annotated[str, typer.Option(metavar="LIST", help="Which are shown.", rich_help_panel=RESULTS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=RESULTS)]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write it as JSON, with machine and versions.", rich_help_panel=RESULTS),
]
Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A directory with config.json and safetensors, or a Hub id org/name."),
]
Dtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=ENGINE)
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--parallelism-strategy",
        "--mesh",
        metavar="STRATEGY",
        help="How to shard the model over devices, as in tensor=4.",
        rich_help_panel=ENGINE,
    ),
]
Warmups = Annotated[int, typer.Option(min=0, metavar="N", help="Repetitions off the clock.", rich_help_panel=RESULTS)]


def prompts(
    number: int | None,
    input_tokens: str,
    output_tokens: str,
    prefix_tokens: int,
    dataset: Path | None,
    seed: int,
    *,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> list[Prompt]:
    """Make the workload's prompts from the command line's values.

    Args:
        number: number of prompts; None is 100 random prompts, or the whole dataset.
        input_tokens: prompt lengths, as in 128 or 16-256.
        output_tokens: maximum output lengths, as in 128 or 16-256.
        prefix_tokens: length of the prefix that all random prompts share.
        dataset: a file of prompts; None makes random ones.
        seed: seed of all draws.
        vocab_size: make random prompts of token ids below it.
        tokenizer: directory or Hub id of a tokenizer that measures texts.

    Raises:
        RequestError: a value is malformed, or the dataset or the tokenizer cannot be read.
    """
    from ttpu_serve.bench.tokenizer import load_tokenizer
    from ttpu_serve.bench.workload import Lengths, random_prompts, read_dataset

    inputs, outputs = Lengths.parse(input_tokens, "--input-tokens"), Lengths.parse(output_tokens, "--output-tokens")
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    if dataset is not None:
        return read_dataset(dataset, number, outputs, seed=seed, tokenizer=loaded)
    return random_prompts(
        100 if number is None else number,
        inputs,
        outputs,
        seed=seed,
        prefix=prefix_tokens,
        vocab_size=vocab_size,
        tokenizer=loaded,
    )


def percentiles(text: str) -> tuple[float, ...]:
    """Parse percentiles, as in 50,90,99.

    Raises:
        RequestError: a part is not a number from 0 to 100.
    """
    try:
        points = tuple(float(part) for part in text.split(","))
    except ValueError:
        points = ()
    if not points or not all(0 <= point <= 100 for point in points):
        raise RequestError(f"--percentiles {text!r} was given, but numbers from 0 to 100 are needed, as in 50,90,99.")
    return points


def positive(option: str, value: float, allowed: str) -> None:
    """Check that an option's value is positive, and finite unless `allowed` mentions inf.

    Raises:
        RequestError: the value is not allowed.
    """
    if not value > 0 or (math.isinf(value) and "inf" not in allowed):
        raise RequestError(f"{option} {value:g} was given, but {allowed}, is needed: correct it.")


def check_output(path: Path | None) -> None:
    """Check that the output file can be written, before anything is measured. None is accepted.

    Raises:
        RequestError: the file cannot be written.
    """
    if path is None:
        return
    try:
        check_target(path)
    except OSError as error:
        raise RequestError(
            f"--output {str(path)!r} was given, but it cannot be written ({error.strerror or error}): name a file in a "
            "folder that exists and may be written to."
        ) from error


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON."""
    write_whole(path, json.dumps(document, indent=2) + "\n")


class Bar:
    """A context manager that shows a progress bar on stderr if it is a terminal; it gives `advance(failed)`, which
    counts one more."""

    def __init__(self, noun: str, total: int) -> None:
        self._noun, self._total, self._failed = noun, total, 0

    def __enter__(self) -> Any:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn(self._noun),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = stderr_console()
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._progress.start()
        self._task = self._progress.add_task(self._noun, total=self._total, failed="")
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _advance(self, failed: bool = False) -> None:
        self._failed += failed
        told = f"[red]{self._failed} failed[/red]" if self._failed else ""
        self._progress.update(self._task, advance=1, failed=told)
