"""`ttpu conformance` runs the checks of model types and prints a table; on request it also writes JSON, a badge and
Markdown. The exit status is 1 if a promise does not hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttpu_core.cli.console import counted, note, stderr_console, stdout_console

if TYPE_CHECKING:
    from ttpu_conformance.report import Report
    from ttpu_conformance.runner import Result
    from ttpu_conformance.selection import Item
    from ttpu_conformance.session import Request


class DeviceChoice(StrEnum):
    """Where numbers are computed."""

    cpu = "cpu"
    tpu = "tpu"


class LevelChoice(StrEnum):
    """How much is checked."""

    quick = "quick"
    standard = "standard"
    full = "full"


def conformance(
    model_type: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL_TYPE...", help="Model types that installed plugins describe.")
    ] = None,
    all_types: Annotated[
        bool, typer.Option("--all", help="Every model type that an installed plugin describes.")
    ] = False,
    survey: Annotated[
        bool,
        typer.Option(
            "--survey",
            help="Instead of checking plugins, run every causal language model of transformers in a tiny size, with a "
            "plugin or without, and write a page of what works. Model types, or --only TYPE, make their rows anew; "
            "without them only rows that are missing in --json (model-support.json) are made. --markdown names the "
            "page (model-support.md).",
        ),
    ] = False,
    level: Annotated[
        LevelChoice,
        typer.Option(
            help="Seconds per type (quick), all checks of each type's base variant and the quick ones of the others "
            "(standard), or everything that runs on any machine (full)."
        ),
    ] = LevelChoice.full,
    device: Annotated[DeviceChoice, typer.Option(help="Where numbers are computed.")] = DeviceChoice.cpu,
    require_tpu: Annotated[
        bool, typer.Option("--require-tpu", help="Compute on a TPU, and fail where there is none.")
    ] = False,
    compile_for: Annotated[
        str | None,
        typer.Option(metavar="CHIPS", help="Also compile published sizes for these chips, as in v5e,v6e."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Only this check; repeat for more.")
    ] = None,
    patch_pack: Annotated[
        list[str] | None,
        typer.Option("--patch-pack", metavar="NAME", help="Check under this patch pack; repeat for more."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which backend runs the models, else the default one.")
    ] = None,
    attn_implementation: Annotated[str, typer.Option(metavar="NAME", help="As in from_pretrained.")] = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, each with one model type at a time; as many as cores unless said."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every result as JSON.")
    ] = None,
    badge_file: Annotated[
        Path | None, typer.Option("--badge", metavar="FILE", help="Write a shields.io badge.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write tables as Markdown.")
    ] = None,
) -> None:
    """Hold plugins against what they promise.

    Examples:

      ttpu conformance llama

      ttpu conformance --all --level quick

      ttpu conformance llama --backend torch_xla

      ttpu conformance llama --compile-for v5e,v6e --json llama.json

      ttpu conformance --survey --json model-support.json --markdown model-support.md

    \f
    Raises:
        RequestError: no model type, or both --all and model types.
        MissingDependencyError: --compile-for was given, but libtpu is not installed.
        UnsupportedError: --require-tpu was given on a machine without a TPU.
    """
    from ttpu_conformance.case import Options
    from ttpu_conformance.model_under_test import backend_under_test
    from ttpu_conformance.selection import levels_on
    from ttpu_conformance.session import Request, prepare, usual_jobs
    from ttpu_core.errors import MissingDependencyError, RequestError, UnsupportedError
    from ttpu_core.files import write_whole
    from ttpu_core.registry import default_registry

    if survey:
        from ttpu_conformance.survey.command import run_survey

        for option, file in (("--json", json_file), ("--markdown", markdown_file)):
            refuse_unwritable(option, file)
        run_survey([*(model_type or ()), *(only or ())], json_file, markdown_file)
        return
    registry = default_registry()
    types = list(registry.model_types()) if all_types else model_type or []
    if not types or (all_types and model_type):
        raise RequestError(
            "conformance was asked for "
            + ("both --all and some model types" if model_type else "no model type")
            + f"; installed plugins describe {', '.join(registry.model_types()) or 'none'}: name some, or pass --all."
        )
    for option, file in (("--json", json_file), ("--badge", badge_file), ("--markdown", markdown_file)):
        refuse_unwritable(option, file)
    chips = chips_named(compile_for)
    if chips and importlib.util.find_spec("libtpu") is None:
        raise MissingDependencyError(
            f"--compile-for {compile_for} needs libtpu, which is not installed: it needs no TPU, only "
            '`pip install "ttpu-conformance[tpu]"`.'
        )
    device = DeviceChoice.tpu if require_tpu else device
    options = Options(device.value, tuple(patch_pack or ()), attn_implementation, backend)
    prepare(options)
    if require_tpu:
        missing = backend_under_test(backend).missing_device("tpu")
        if missing:
            raise UnsupportedError(f"--require-tpu was given, but {missing}: run this on a TPU machine.")
    request = Request(
        level.value,
        levels_on(device.value),
        tuple(only or ()),
        chips,
        options,
    )
    report = None
    for report in _reports(types, request, jobs or usual_jobs(types, request.options)):
        for file, content in ((json_file, report.to_json()), (badge_file, report.badge())):
            if file is not None:  # after each type, since a long run may be interrupted
                write_whole(file, json.dumps(content, indent=2, allow_nan=False) + "\n")
    assert report is not None
    _print(report)
    if markdown_file is not None:
        from ttpu_conformance.markdown import markdown

        write_whole(markdown_file, markdown(report))
    if not report.passed:
        raise typer.Exit(1)


def _reports(types: list[str], request: Request, jobs: int) -> Iterator[Report]:
    """A report of all results so far, after each model type."""
    from ttpu_conformance.model_under_test import backend_under_test
    from ttpu_conformance.report import make_report
    from ttpu_conformance.session import check_types

    sizes = {one: len(request.items(one)) for one in types}  # what is not known is refused before anything runs
    done: dict[str, list[Result]] = {}
    begun = 0
    with stderr_console().status(f"{counted(len(types), 'model type')} in {jobs} processes") as status:

        def announce(item: Item) -> None:
            nonlocal begun
            begun += 1
            status.update(f"{begun} of {sum(sizes.values())}: {item.id}")

        for one, results in check_types(types, request, jobs, announce):
            done[one] = results
            failed = sum(result.status == "failed" for result in results)
            line = f"{one}: {counted(sizes[one], 'check')}, {failed} failed"
            if not sys.stderr.isatty():
                note(line)
            elif jobs > 1:
                status.update(f"{len(done)} of {counted(len(types), 'model type')} ({line})")
            missing = [kind for kind in types if kind not in done]
            so_far = [result for kind in types for result in done.get(kind, [])]
            yield make_report(so_far, request.depth, backend_under_test(request.options.backend), missing)


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Refuse a file that could not be written, before the work whose results it is for.

    Raises:
        RequestError: it is a directory, or its directory is not there or may not be written.
    """
    from ttpu_core.errors import RequestError
    from ttpu_core.files import check_target

    if file is None:
        return
    try:
        check_target(file)
    except OSError as error:
        raise RequestError(
            f"{option} was given {file}, but {error.strerror}: name a file that can be written."
        ) from error


def chips_named(text: str | None) -> tuple[str, ...]:
    """Chips by the names that the compiler knows, from a list with commas.

    Raises:
        UnsupportedError: a chip that does not exist.
    """
    if text is None:
        return ()
    from ttpu_core.sharding.hardware import chip_named

    return tuple(chip_named(name.strip()).name for name in text.split(","))


COLUMNS = ("model type", "check", "status", "cases", "max error", "allowed", "seconds")
STYLES = {
    "passed": "green",
    "failed": "bold red",
    "expected failure": "yellow",
    "skipped": "yellow",
    "expected skip": "yellow",
    "not applicable": "dim",
}


def _print(report: Report) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[3:] else "left")
    grouped: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in report.results:
        grouped[result.model_type, result.check, result.status].append(result)
    previous = ""
    for (model_type, check, status), members in grouped.items():
        worst = max(members, key=lambda r: (r.error or 0.0) / (r.tolerance or 1.0))
        table.add_row(
            model_type if model_type != previous else "",
            check,
            Text(status, STYLES[status]),
            str(len(members)),
            "" if worst.error is None else f"{worst.error:.1e}",
            "" if worst.tolerance is None else f"{worst.tolerance:.1e}",
            f"{sum(r.seconds for r in members):.1f}",
        )
        previous = model_type
    console.print(table)
    told: dict[tuple[str, str, str], list[str]] = defaultdict(list)  # one cause may fail every check of a type
    for result in report.results:
        shown = result.status == "passed" and (result.level == "compile" or result.check == "every_knob")
        if shown or result.status not in ("passed", "not applicable"):
            where = f"{result.model_type}-{result.variant}-{result.check}"
            told[result.model_type, result.status, result.reason].append(where)
    for (_, outcome, reason), names in told.items():
        others = f" and {counted(len(names) - 1, 'other check')}" if len(names) > 1 else ""
        console.print(Text.assemble((outcome, STYLES[outcome]), f" {names[0]}{others}: {reason}"))
    for sentence in report.unproven.values():
        console.print(Text.assemble(("failed", STYLES["failed"]), f" {sentence}"))
    counts = ", ".join(f"{number} {status}" for status, number in report.counts.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    seconds = sum(result.seconds for result in report.results)
    console.print(f"{counts or 'no checks'}, in {seconds:.0f} s on {report.device}; {versions}")
