"""Experiment trackers: TensorBoard, wandb, trackio and mlflow, those that are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ttpu_core.errors import MissingDependencyError
from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

Log = Callable[[dict[str, float], int], Any]
"""Called with numbers by name, and the step."""

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Name of the tracker → the package to import."""
DISTRIBUTIONS = {"tensorboard": '"ttpu-train[tensorboard]"'}
"""Name of the tracker → what `pip install` brings it, where that is not its own name."""


class Tracker(TrainerCallback):
    """Sends numbers of the log to a tracker, in the process that writes files.

    Args:
        open_run: called with the run's name, its folder and its arguments; returns functions that log numbers at a
            step, and that end the run.
    """

    def __init__(self, open_run: Callable[..., tuple[Log, Callable[[], Any]]]) -> None:
        self._open = open_run
        self._log: Log | None = None
        self._end: Callable[[], Any] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the run."""
        if state.is_world_process_zero:
            name = args.run_name or args.folder.name
            config = {key: value for key, value in vars(args).items() if isinstance(value, str | int | float | bool)}
            self._log, self._end = self._open(name, args.folder, config)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Send a line: figures of evaluations as eval/..., others as train/..."""
        if self._log is not None and logs:
            self._log(_grouped(logs), logs["step"])

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the run."""
        if self._end is not None:
            self._end()
            self._log = self._end = None


def trackers(names: Sequence[str], *, all_installed: bool) -> list[Tracker]:
    """The trackers of `report_to`.

    Args:
        names: among tensorboard, wandb, trackio, mlflow.
        all_installed: leave out those that are not installed, instead of refusing them.

    Raises:
        MissingDependencyError: one that was named is not installed.
    """
    made = []
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            if all_installed:
                continue
            raise MissingDependencyError(
                f"report_to={name!r} was asked for, but {PACKAGES[name]} is not installed: `pip install "
                f"{DISTRIBUTIONS.get(name, name)}` brings it."
            )
        made.append(Tracker(_OPENERS[name]))
    return made


def _grouped(logs: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: float(value) for key, value in logs.items() if isinstance(value, int | float) and key != "step"}
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in numbers.items()
    }


def _tensorboard(name: str, folder: Any, config: dict[str, Any]) -> Any:
    writer = import_module("tensorboardX").SummaryWriter(str(folder / "tensorboard"))
    rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
    writer.add_text("arguments", f"| argument | value |\n|---|---|\n{rows}")

    def log(figures: dict[str, float], step: int) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, writer.close


def _wandb(name: str, folder: Any, config: dict[str, Any]) -> Any:
    run = import_module("wandb").init(name=name, dir=str(folder), config=config, resume="allow")
    return lambda figures, step: run.log(figures, step=step), run.finish


def _trackio(name: str, folder: Any, config: dict[str, Any]) -> Any:
    trackio = import_module("trackio")
    trackio.init(project="ttpu", name=name, config=config, resume="allow")
    return lambda figures, step: trackio.log(figures, step=step), trackio.finish


def _mlflow(name: str, folder: Any, config: dict[str, Any]) -> Any:
    mlflow = import_module("mlflow")
    mlflow.start_run(run_name=name)
    mlflow.log_params(config)
    return lambda figures, step: mlflow.log_metrics(figures, step=step), mlflow.end_run


_OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
