"""A run on the terminal: a progress bar with loss, throughput and the time that is left, and the lines of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttpu_core.cli.console import stderr_console
from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "eval_loss": ("eval loss", "{:.4f}"),
    "eval_perplexity": ("perplexity", "{:.2f}"),
    "eval_accuracy": ("accuracy", "{:.1%}"),
    "grad_norm": ("grad norm", "{:.3f}"),
    "learning_rate": ("learning rate", "{:.2e}"),
    "tokens_per_second_per_device": ("tokens/s/device", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "skipped_updates": ("skipped updates", "{:,}"),
}
"""The figures of a line that are printed, with their names and formats."""
LEFT_OUT = ("_tokens", "_runtime", "_tokens_per_second")
"""The ends of the names of an evaluation's figures that are not printed."""


def line_of(logs: dict[str, Any]) -> str:
    """One line of the log for people; "" if none of its figures is shown."""
    figures = [f"{name} {form.format(logs[key])}" for key, (name, form) in SHOWN.items() if key in logs]
    more = [
        f"{key} {value:.4g}"
        for key, value in logs.items()
        if key.startswith("eval_") and key not in SHOWN and not key.endswith(LEFT_OUT) and isinstance(value, float)
    ]
    return f"step {logs['step']:,}: " + ", ".join([*figures, *more]) if figures or more else ""


class ConsoleReporter(TrainerCallback):
    """Prints the log to stderr, above a progress bar if stderr is a terminal.

    Args:
        bar: whether there is a progress bar; None: on a terminal.
    """

    def __init__(self, *, bar: bool | None = None) -> None:
        self._console = stderr_console()
        self._bar = self._console.is_terminal if bar is None else bar
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the bar."""
        if not (self._bar and state.is_world_process_zero):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("compiling", total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, latest: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            shown = "compiling" if latest is None else f"loss {latest.loss:.3f}"
            self._progress.update(self._task, completed=state.global_step, description=shown)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Print a line."""
        if logs and state.is_world_process_zero and (line := line_of(logs)):
            self._console.print(line, soft_wrap=True, markup=False)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar, also after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
