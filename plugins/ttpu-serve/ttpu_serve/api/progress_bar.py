"""The progress bar of calls of `LLM`."""

from __future__ import annotations

from typing import Any


class ProgressBar:
    """A progress bar over requests on a terminal, or one that shows nothing. `with` gives the function to call for each
    request that is done."""

    def __init__(self, total: int, show: bool) -> None:
        self._total, self._show, self._progress = total, show, None

    def __enter__(self) -> Any:
        if not self._show:
            return lambda: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, transient=True)
        progress.start()
        self._progress = progress  # type: ignore[assignment]
        task = progress.add_task("requests", total=self._total)
        return lambda: progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
