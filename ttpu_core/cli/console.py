"""Output that the commands share: consoles for tables, one-line errors, sizes in words, and the progress of a load.
Results go to stdout, everything else to stderr."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

WIDTH_WITHOUT_TERMINAL = 160
"""Columns of a table in a file or a pipe, where rich would otherwise wrap at 80."""


def stdout_console() -> Console:
    """A console on stdout as it is now (a test may have replaced it)."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def stderr_console() -> Console:
    """A console on stderr, for progress and for tables that are not the result."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_facts(facts: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Titles beside their lines on stdout: wrapped for a terminal, and one line each in a file or a pipe."""
    rows = [(title if number == 0 else "", line) for title, lines in facts for number, line in enumerate(lines)]
    if not sys.stdout.isatty():
        width = max((len(title) for title, _ in rows), default=0)
        print("\n".join(f"{title:{width}}  {line}" for title, line in rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, line in rows:
        table.add_row(title, Text(line))
    stdout_console().print(table)


def print_json(value: object) -> None:
    """One JSON document on stdout, and nothing else. Numbers that are not finite are null."""
    import json

    print(json.dumps(finite(value), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:
    """A value with None in place of each float that is not finite, because JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def note(text: str) -> None:
    """One line on stderr, unwrapped and uncoloured, so that it can be searched and copied."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show warnings as lines for people, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: note(f"warning: {' '.join(str(message).split())}")
        yield


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `1,024 tensors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def in_milliseconds(seconds: float) -> str:
    """Seconds in milliseconds: `4.10 ms`, `1,131 ms`."""
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def in_bytes(number: float) -> str:
    """A size in binary units: `16.1 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


class LoadProgress:
    """A progress bar for bytes loaded and a spinner while programs compile, on stderr and only if it is a terminal.

    Call it with the backend's progress events; `close` before the first text is written, because a line that is redrawn
    would erase text beside it. Whatever comes after `close` is not shown.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: str, done: float, total: float) -> None:
        """`event` is "load" (bytes) or "compile" (programs, or 0 of 1 at the start and 1 of 1 at the end); others are
        not shown."""
        if not self._shown or event not in ("load", "compile"):
            return
        if done >= total:
            self._finish(event)
            return
        progress = self._started()
        if event not in self._tasks:
            self._tasks[event] = progress.add_task(
                {"load": "loading weights", "compile": "compiling"}[event],
                total=total if event == "load" or total > 1 else None,
                sizes="",
            )
        if event == "load":
            progress.update(self._tasks[event], completed=done, sizes=f"{in_bytes(done)} of {in_bytes(total)}")
        elif total > 1:
            progress.update(self._tasks[event], completed=done, sizes=f"{done:,.0f} of {total:,.0f} programs")

    def close(self) -> None:
        """Remove what is shown, for good."""
        self._shown = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Progress:
        if self._progress is None:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[sizes]}"),
                TimeElapsedColumn(),
                console=stderr_console(),
                transient=True,
            )
            self._progress.start()
        return self._progress

    def _finish(self, event: str) -> None:
        if self._progress is not None and event in self._tasks:
            self._progress.remove_task(self._tasks.pop(event))
        if self._progress is not None and not self._tasks:
            self._progress.stop()
            self._progress = None
