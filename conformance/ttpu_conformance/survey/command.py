"""`ttpu conformance --survey`: walks the model types under a progress bar, and writes their page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ttpu_conformance import environment
from ttpu_conformance.survey.page import page
from ttpu_conformance.survey.rows import Survey
from ttpu_conformance.survey.walk import Progress, walk
from ttpu_core.cli.console import note, stderr_console
from ttpu_core.files import write_whole

JSON_FILE, PAGE_FILE = Path("model-support.json"), Path("model-support.md")


def run_survey(types: Sequence[str], json_file: Path | None, page_file: Path | None) -> Survey:
    """Complete the results in a file, and write their page.

    Args:
        types: whose rows are made anew; none completes what is missing.
        json_file: results, old and new; model-support.json unless said.
        page_file: the page; model-support.md unless said.

    Raises:
        RequestError: a type that transformers does not have, or a file that holds something else.
    """
    environment.prepare()
    file = json_file or JSON_FILE
    if not sys.stderr.isatty():
        survey = walk(file, types, lambda model_type, done, total: note(f"{done} of {total}: {model_type or 'done'}"))
    else:
        survey = _walked(file, types)
    write_whole(page_file or PAGE_FILE, page(survey))
    return survey


def _walked(file: Path, types: Sequence[str]) -> Survey:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=stderr_console()) as bar:
        task = bar.add_task("survey", total=None)

        def show(model_type: str, done: int, total: int) -> None:
            bar.update(task, description=model_type or "survey", completed=done, total=total)

        progress: Progress = show
        return walk(file, types, progress)
