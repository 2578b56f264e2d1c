"""Options that the commands of `ttpu bench` share, and their checks and conversions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import stderr_console
from ttpu_core.errors import RequestError
from ttpu_core.files import check_target, write_whole
from ttpu_serve.cli.engine_options import ENGINE, StepOptions

if TYPE_CHECKING:
    from ttpu_serve.bench.workload import Prompt

WORKLOAD, SENDING, SERVER, RESULTS = "Workload", "Sending", "Server", "Results"

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A directory with config.json and safetensors, or a Hub id org/name."),
]
InputTokens = Annotated[
    str, typer.Option(metavar="N|LOW-HIGH", help="Tokens of each prompt, drawn evenly.", rich_help_panel=WORKLOAD)
]
OutputTokens = Annotated[
    str, typer.Option(metavar="N|LOW-HIGH", help="The most tokens of each output.", rich_help_panel=WORKLOAD)
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of prompts and arrivals.", rich_help_panel=WORKLOAD)]
Warmups = Annotated[int, typer.Option(min=0, metavar="N", help="Repetitions off the clock.", rich_help_panel=RESULTS)]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.", rich_help_panel=RESULTS)]


@dataclass(frozen=True)
class WorkloadOptions:
    """The prompts that are sent."""

    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests; 100, or all of a dataset.", rich_help_panel=WORKLOAD),
    ] = None
    input_tokens: InputTokens = "128"
    output_tokens: OutputTokens = "128"
    prefix_tokens: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Tokens that all prompts begin with, beyond these.", rich_help_panel=WORKLOAD
        ),
    ] = 0
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts instead of random ones: .txt (one a line), .jsonl or .json with prompt, messages or "
            "ShareGPT's conversations.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    seed: Seed = 0

    def prompts(self, *, vocab_size: int | None = None, tokenizer: str | None = None) -> list[Prompt]:
        """Make the prompts.

        Args:
            vocab_size: make random prompts of token ids below it.
            tokenizer: directory or Hub id of a tokenizer that measures texts.

        Raises:
            RequestError: a value is malformed, or the dataset or the tokenizer cannot be read.
        """
        from ttpu_serve.bench.tokenizer import load_tokenizer
        from ttpu_serve.bench.workload import Lengths, random_prompts, read_dataset

        inputs = Lengths.parse(self.input_tokens, "--input-tokens")
        outputs = Lengths.parse(self.output_tokens, "--output-tokens")
        loaded = None if tokenizer is None else load_tokenizer(tokenizer)
        if self.dataset is not None:
            return read_dataset(self.dataset, self.num_prompts, outputs, seed=self.seed, tokenizer=loaded)
        return random_prompts(
            100 if self.num_prompts is None else self.num_prompts,
            inputs,
            outputs,
            seed=self.seed,
            prefix=self.prefix_tokens,
            vocab_size=vocab_size,
            tokenizer=loaded,
        )

    def settings(self, sent: int) -> dict[str, Any]:
        """What a result says of its workload, of which `sent` prompts were sent. A dataset has inputs of its own."""
        random = self.dataset is None
        return {
            "prompts": sent,
            "dataset": None if self.dataset is None else str(self.dataset),
            "input_tokens": self.input_tokens if random else None,
            "output_tokens": self.output_tokens,
            "prefix_tokens": self.prefix_tokens if random else None,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class EngineOptions(StepOptions):
    """The engine that is measured without a server."""

    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=ENGINE),
    ] = "auto"
    parallelism_strategy: Annotated[
        str | None,
        typer.Option(
            "--parallelism-strategy",
            "--mesh",
            metavar="STRATEGY",
            help="How to shard the model over devices, as in tensor=4.",
            rich_help_panel=ENGINE,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The options of `LLM` that were given, by name."""
        given = {"dtype": self.dtype, "parallelism_strategy": self.parallelism_strategy}
        return {name: value for name, value in given.items() if value is not None} | super().arguments()


@dataclass(frozen=True)
class ResultOptions:
    """How results are shown and kept."""

    percentiles: Annotated[str, typer.Option(metavar="LIST", help="Which are shown.", rich_help_panel=RESULTS)] = (
        "50,90,99"
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=RESULTS)] = False
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it as JSON, with machine and versions.", rich_help_panel=RESULTS),
    ] = None

    def __post_init__(self) -> None:
        """Check the values before anything is measured.

        Raises:
            RequestError: a percentile is not a number from 0 to 100, or the output file cannot be written.
        """
        if not self.points or not all(0 <= point <= 100 for point in self.points):
            raise RequestError(
                f"--percentiles {self.percentiles!r} was given, but numbers from 0 to 100 are needed, as in 50,90,99."
            )
        if self.output is None:
            return
        try:
            check_target(self.output)
        except OSError as error:
            raise RequestError(
                f"--output {str(self.output)!r} was given, but it cannot be written ({error.strerror or error}): name "
                "a file in a folder that exists and may be written to."
            ) from error

    @property
    def points(self) -> tuple[float, ...]:
        """The percentiles as numbers; () if one is none."""
        try:
            return tuple(float(part) for part in self.percentiles.split(","))
        except ValueError:
            return ()

    def write(self, document: Mapping[str, Any]) -> None:
        """Write a document as JSON, if a file was named."""
        if self.output is not None:
            write_whole(self.output, json.dumps(document, indent=2) + "\n")


def positive(option: str, value: float, allowed: str) -> None:
    """Check that an option's value is positive, and finite unless `allowed` mentions inf.

    Raises:
        RequestError: the value is not allowed.
    """
    if not value > 0 or (math.isinf(value) and "inf" not in allowed):
        raise RequestError(f"{option} {value:g} was given, but {allowed}, is needed: correct it.")


class Bar:
    """A context manager that shows a progress bar on stderr if it is a terminal; it gives `advance(failed)`, which
    counts one more. done: of the total, those that were there before. shown: whether it is shown at all."""

    def __init__(self, noun: str, total: int, *, done: int = 0, shown: bool = True) -> None:
        self._noun, self._total, self._done, self._shown, self._failed = noun, total, done, shown, 0

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
        hidden = not (self._shown and console.is_terminal)
        self._progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self._progress.start()
        self._task = self._progress.add_task(self._noun, total=self._total, completed=self._done, failed="")
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _advance(self, failed: bool = False) -> None:
        self._failed += failed
        told = f"[red]{self._failed} failed[/red]" if self._failed else ""
        self._progress.update(self._task, advance=1, failed=told)
