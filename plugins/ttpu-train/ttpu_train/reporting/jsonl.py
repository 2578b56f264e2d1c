"""The log of a run as a file of JSON lines, `log.jsonl` in its folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ttpu_core.cli.console import finite
from ttpu_core.files import write_whole
from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

NAME = "log.jsonl"


class JsonLinesReporter(TrainerCallback):
    """Appends each line of the log. Where a run goes back to a checkpoint, the lines after it are taken out. A file
    that cannot be written, as on a full disk, is told of once and ends no run; its lines follow when they can. Numbers
    that are not finite are null. Lines before a training begins are written when it begins, because until then the file
    may be another run's."""

    def __init__(self) -> None:
        self._begun = False
        self._written: int | None = None  # lines; None: the file may hold anything
        self._fails = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what is known already."""
        if state.is_world_process_zero:
            self._begun, self._written = True, None
            self._write(args, state)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Append a line."""
        if self._begun and state.is_world_process_zero and logs:
            self._write(args, state)

    def _write(self, args: Any, state: TrainerState) -> None:
        path, lines = Path(args.folder / NAME), state.log_history
        try:
            if self._written is not None and len(lines) == self._written + 1:
                with path.open("a", encoding="utf-8") as file:
                    file.write(_line(lines[-1]))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, "".join(_line(one) for one in lines))
            self._written, self._fails = len(lines), False
        except OSError as error:
            if not self._fails:
                logger.warning(
                    "the log was to be written to %s, but that failed (%s): make it possible, so that the lines "
                    "can follow; training goes on", path, error.strerror,
                )  # fmt: skip
            self._written, self._fails = None, True


def _line(logs: dict[str, Any]) -> str:
    return json.dumps(finite(logs)) + "\n"
