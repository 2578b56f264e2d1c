"""The log of a run as a file of JSON lines, `log.jsonl` in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ttpu_core.files import write_whole
from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

NAME = "log.jsonl"


class JsonLinesReporter(TrainerCallback):
    """Appends each line of the log. Where a run goes back to a checkpoint, the lines after it are taken out."""

    def __init__(self) -> None:
        self._written = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what is known already."""
        if state.is_world_process_zero:
            args.folder.mkdir(parents=True, exist_ok=True)
            self._write_all(args, state)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Append a line."""
        if not (state.is_world_process_zero and logs):
            return
        if len(state.log_history) != self._written + 1:
            self._write_all(args, state)
            return
        with Path(args.folder / NAME).open("a", encoding="utf-8") as file:
            file.write(_line(logs))
        self._written += 1

    def _write_all(self, args: Any, state: TrainerState) -> None:
        write_whole(args.folder / NAME, "".join(_line(one) for one in state.log_history))
        self._written = len(state.log_history)


def _line(logs: dict[str, Any]) -> str:
    return json.dumps(logs) + "\n"
