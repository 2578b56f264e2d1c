"""The log of a run that the user's own loop drives: every few updates a line with the loss, to the terminal and to
trackers."""

from __future__ import annotations

from collections import deque
from typing import Any

from ttpu_train.callbacks import CallbackList
from ttpu_train.profiling import ProfileCallback
from ttpu_train.reporting.console import ConsoleReporter
from ttpu_train.reporting.trackers import Tracker
from ttpu_train.run import AHEAD, Window
from ttpu_train.runner import InFlight, StepValues
from ttpu_train.throughput import Meter
from ttpu_train.trainer import Trainer


class Progress:
    """Takes in the figures of updates as devices finish them, and logs them.

    Args:
        trainer: with the model and the arguments of the run.
        every: updates between two lines.

    Attributes:
        skipped: updates that changed nothing, of those taken in.
    """

    def __init__(self, trainer: Trainer, every: int) -> None:
        self._trainer, self._every, self._first = trainer, every, trainer.args.logging_first_step
        own = [one for one in trainer.callbacks.callbacks if isinstance(one, Tracker | ProfileCallback)]
        self._callbacks = CallbackList([ConsoleReporter(bar=False), *own])
        self._meter = Meter(0.0, trainer.layout.device_count, None)
        self._flying: deque[InFlight[StepValues]] = deque()
        self._window = Window()
        self._is_open = False
        self.skipped = 0

    def begin(self, steps: int) -> None:
        """An update comes next, after `steps` others."""
        state = self._trainer.state
        state.global_step = steps
        if not self._is_open:
            self._is_open = True
            state.is_world_process_zero = state.is_local_process_zero = self._trainer.layout.process_index == 0
            self._tell("on_train_begin")
            self._meter.start()
        self._tell("on_step_begin")

    def given(self, update: InFlight[StepValues]) -> None:
        """An update was given to the devices."""
        state = self._trainer.state
        state.global_step += 1
        self._flying.append(update)
        while len(self._flying) > AHEAD:
            self._take()
        self._tell("on_step_end")
        if state.global_step % self._every == 0 or (self._first and state.global_step == 1):
            self._log()

    def drain(self) -> None:
        """Wait for the updates that devices have before them."""
        while self._flying:
            self._take()

    def end(self) -> None:
        """Close trackers and a trace."""
        self.drain()
        if self._is_open:
            self._tell("on_train_end")
            self._is_open = False

    def _take(self) -> None:
        values = self._flying.popleft().values()
        self._window.add(values)
        self._meter.add(values.tokens)
        self.skipped += values.skipped

    def _log(self) -> None:
        self.drain()
        window, self._window = self._window, Window()
        last = window.last
        if last is None:
            return
        logs: dict[str, Any] = {"loss": window.loss, "grad_norm": last.grad_norm, "learning_rate": last.learning_rate}
        if window.skipped:
            logs["skipped_updates"] = window.skipped
        self._tell("on_log", logs={**logs, **self._meter.figures(), "step": self._trainer.state.global_step})

    def _tell(self, event: str, **more: Any) -> None:
        trainer = self._trainer
        self._callbacks.call(event, trainer.args, trainer.state, trainer.control, model=trainer.runner, **more)
