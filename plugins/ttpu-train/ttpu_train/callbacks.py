"""What a trainer tells callbacks, by the names of transformers: `TrainerState`, `TrainerControl` and the events
`on_train_begin`, `on_step_end`, `on_log`, `on_evaluate`, `on_save`, `on_train_end` and the rest. A callback written for
transformers' Trainer works here if it reads no torch object."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ttpu_core.errors import RequestError

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
)

NOT_CALLED = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_push_begin")
"""Events of transformers that a compiled update does not have."""


@dataclass
class TrainerState:
    """Where a run is. It is saved with each checkpoint, but for the last three fields.

    Attributes:
        epoch: passes over the training data so far, with their fraction.
        global_step: updates so far.
        max_steps: updates of the whole run.
        num_train_epochs: passes of the whole run, rounded up.
        num_input_tokens_seen: tokens of all rows so far that have a weight.
        train_seconds: time in training so far, over all parts of a resumed run.
        total_flos: FLOPs so far, by the formula in docs/training.md.
        log_history: each line of the log.
        best_metric: the best value of the chosen metric.
        best_global_step: its step.
        best_model_checkpoint: its folder.
        is_world_process_zero: whether this process writes files.
        is_local_process_zero: the same.
        train_batch_size: rows of one update over all processes.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    num_input_tokens_seen: float = 0.0
    train_seconds: float = 0.0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    train_batch_size: int = 0

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        kept = asdict(self)
        for name in ("is_world_process_zero", "is_local_process_zero", "train_batch_size"):
            del kept[name]
        return kept

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what a checkpoint kept; `max_steps` and `num_train_epochs` stay those of this run."""
        known = {one.name for one in fields(self)} - {"max_steps", "num_train_epochs"}
        for name, value in saved.items():
            if name in known:
                setattr(self, name, value)


def log_line(state: TrainerState, logs: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the log with its epoch and its step. It is added to the state's history."""
    line = {**logs, "epoch": round(state.epoch, 6), "step": state.global_step}
    state.log_history.append(line)
    return line


@dataclass
class TrainerControl:
    """What a callback asks for, by setting a field or returning a control.

    Attributes:
        should_training_stop: end after this update.
        should_epoch_stop: accepted for callbacks of transformers; ends the run like `should_training_stop`.
        should_save: write a checkpoint after this update.
        should_evaluate: evaluate after this update.
        should_log: log this update.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerCallback:
    """Base of callbacks: override what you need. Each event gets the arguments, the state and the control, and by name
    `model` (of the trainer's runner, None before training), and `metrics` or `logs` where there are some."""

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The trainer is made."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The first update comes next."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The last update is done."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A pass over the data begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A pass over the data ends."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An update begins."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An update was given to the devices, which may still compute it."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The evaluation data were used; `metrics`."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """`predict` is done; `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint is being written."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """`logs`: the figures of this line."""


class CallbackList:
    """Calls callbacks in order.

    Args:
        callbacks: instances, or classes of which an instance is made.

    Raises:
        RequestError: one has no event's method.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.callbacks: list[Any] = []
        for one in callbacks:
            self.add(one)

    def add(self, callback: Any) -> None:
        """Add a callback at the end, with a warning of events that are never called.

        Raises:
            RequestError: it has no event's method.
        """
        made = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(made, event, None)) for event in EVENTS):
            raise RequestError(
                f"the callback {type(made).__name__} was given, but it has none of the methods {', '.join(EVENTS)}: "
                "inherit from ttpu.TrainerCallback."
            )
        kinds = [one for one in type(made).__mro__ if one.__name__ != "TrainerCallback"]  # transformers' has them all
        silent = [event for event in NOT_CALLED if any(event in vars(kind) for kind in kinds)]
        if silent:
            warnings.warn(
                f"the callback {type(made).__name__} has {', '.join(silent)}, which is never called: an update, with "
                "its parts and the optimizer, is one compiled program",
                stacklevel=4,
            )
        self.callbacks.append(made)

    def call(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Call an event of each; a control that a callback returns is taken over."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            answer = None if method is None else method(args, state, control, **more)
            if answer is not None and answer is not control:
                for one in fields(control):
                    setattr(control, one.name, getattr(answer, one.name, getattr(control, one.name)))
