"""The loop of a run: batches go to the runner, and its figures come back a little later. Between updates it logs,
evaluates, saves, and listens to callbacks and signals."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ttpu_core.errors import TTPUError
from ttpu_train.arguments import TrainingArguments, steps_of
from ttpu_train.callbacks import CallbackList, TrainerControl, TrainerState, log_line
from ttpu_train.checkpoints import CHECKPOINTS, Checkpoints, steps_in
from ttpu_train.interrupts import StopRequest
from ttpu_train.objectives import Reward
from ttpu_train.resuming import BEST, compare
from ttpu_train.runner import Batch, InFlight, StepValues, TrainRunner
from ttpu_train.throughput import Meter
from ttpu_train.watchdog import Watchdog

AHEAD = 2
"""Updates that devices may have before them, so that they never wait for the host."""
ROLLBACKS = 3
"""Rollbacks to one checkpoint after which a run ends: it has no way past what makes its loss grow."""
SMOOTHING = 0.98
"""Of the running mean of the loss that spikes are compared with."""


class TrainingError(TTPUError):
    """A run cannot go on: its loss is not finite, or grows without end."""


@contextmanager
def _memory_named() -> Iterator[None]:
    """Say that devices' memory is too small, in place of XLA's words.

    Raises:
        TrainingError: it is.
    """
    try:
        yield
    except TTPUError:
        raise
    except Exception as error:  # each framework has its own class
        words = str(error)
        if "RESOURCE_EXHAUSTED" not in words and "out of memory" not in words.lower():
            raise
        raise TrainingError(
            f"an update was to be computed, but the devices' memory does not hold it ({words.splitlines()[0][:200]}): "
            "lower per_device_train_batch_size and raise gradient_accumulation_steps, shard the model over more "
            "devices, lower max_length, or set remat to full."
        ) from error


class Batches(Protocol):
    """Batches whose position can be saved.

    epoch: passes over the data so far, with their fraction.
    samples_next: whether the next batch is preceded by sampling completions, which takes longer than an update.
    """

    epoch: float

    @property
    def samples_next(self) -> bool: ...

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was taken, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        ...


@dataclass
class Intervals:
    """The updates after which something is due, in a run of `total` updates.

    Attributes:
        logging: updates between lines of the log. first: the first update too.
        evaluation: updates between evaluations; None: not by updates. saving: the same for checkpoints.
        per_epoch: what is due at the end of each epoch, of "evaluate" and "save".
    """

    total: int
    logging: int
    first: bool
    evaluation: int | None
    saving: int | None
    per_epoch: frozenset[str]

    @classmethod
    def of(cls, args: TrainingArguments, total: int) -> Intervals:
        """The intervals that the arguments ask for."""
        logging = steps_of(args.logging_steps, total)
        evaluation = steps_of(args.logging_steps if args.eval_steps is None else args.eval_steps, total)
        strategies = {"evaluate": args.eval_strategy, "save": args.save_strategy}
        return cls(
            total,
            logging,
            args.logging_first_step,
            evaluation if args.eval_strategy == "steps" else None,
            steps_of(args.save_steps, total) if args.save_strategy == "steps" else None,
            frozenset(name for name, strategy in strategies.items() if strategy == "epoch"),
        )

    def after_step(self, control: TrainerControl, step: int) -> None:
        """Ask for what is due after update number `step`, beside what callbacks asked for. The last update is always
        evaluated, as in transformers."""
        is_last = step == self.total
        control.should_log |= step % self.logging == 0 or is_last or (self.first and step == 1)
        control.should_evaluate |= self.evaluation is not None and (step % self.evaluation == 0 or is_last)
        control.should_save |= self.saving is not None and step % self.saving == 0

    def after_epoch(self, control: TrainerControl) -> None:
        """Ask for what is due at the end of an epoch."""
        control.should_log = False
        control.should_evaluate, control.should_save = ("evaluate" in self.per_epoch), ("save" in self.per_epoch)


@dataclass
class Window:
    """The figures of the updates since the last line of the log."""

    losses: list[float] = field(default_factory=list)
    cross_entropies: list[float] = field(default_factory=list)
    skipped: int = 0
    last: StepValues | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def add(self, values: StepValues) -> None:
        """Add an update's figures."""
        self.last = values
        if values.skipped:
            self.skipped += 1
        else:
            self.losses.append(values.loss)
            self.cross_entropies.append(values.cross_entropy)
            for name, value in values.metrics.items():
                self.metrics.setdefault(name, []).append(value)

    @property
    def loss(self) -> float:
        """The mean loss of the updates that were not skipped; NaN if there are none."""
        return _mean(self.losses) if self.losses else math.nan

    def means(self) -> dict[str, float]:
        """The means of the objective's figures, and the mean cross-entropy where more than that is minimized. Each mean
        is over the updates that have the figure."""
        found = {name: _mean(values) for name, values in self.metrics.items()}
        return found if self.cross_entropies == self.losses else {"cross_entropy": _mean(self.cross_entropies), **found}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass
class TrainingRun:
    """One run from its first update, or from a checkpoint, to its end.

    Attributes:
        args: of the trainer.
        runner: computes updates.
        batches: the training data.
        store: the run's checkpoints; None writes none.
        state: where the run is.
        control: what callbacks ask for.
        callbacks: are told.
        meter: measures throughput.
        evaluate: evaluates and returns metrics; None where nothing is ever evaluated.
        measured: further figures of a line of the log.
        arguments: what checkpoints keep of the run's arguments.
    """

    args: TrainingArguments
    runner: TrainRunner
    batches: Batches
    store: Checkpoints | None
    state: TrainerState
    control: TrainerControl
    callbacks: CallbackList
    meter: Meter
    evaluate: Callable[[], dict[str, float]] | None = None
    checkpoint_name: Callable[[int], Path] = field(default=lambda step: Path(f"checkpoint_{step}"))
    measured: Callable[[], dict[str, float]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flying: deque[InFlight[StepValues]] = deque()
        layout = self.runner.layout
        self._watchdog = Watchdog(
            self.args.hung_step_factor, self.args.hung_step_seconds, layout.process_index, layout.process_count
        )
        self._window = Window()
        self._not_finite = self._rollbacks = 0
        self._running_mean: float | None = None
        self._losses_sum = self._losses_count = 0.0
        self._last_metrics: dict[str, float] | None = None
        self._saved_at: int | None = None
        self._saves_nothing = self._is_in_epoch = False
        self._epochs_ended = 0  # of the data, to which a rollback does not go back
        self._evaluated_at: int | None = None

    @property
    def mean_loss(self) -> float:
        """The mean loss of the updates of this call; NaN before the first."""
        return self._losses_sum / self._losses_count if self._losses_count else math.nan

    def run(self) -> str | None:
        """Train until the end, or until a callback or a signal ends it; the name of the signal if one did.

        Raises:
            TrainingError: too many updates in a row had gradients that are not finite, or spikes come back after
                several rollbacks.
            CheckpointError: a checkpoint could not be written.
        """
        intervals = Intervals.of(self.args, self.state.max_steps)
        self.control.should_training_stop = self.control.should_epoch_stop = False  # an earlier call's
        self._epochs_ended = math.floor(self.state.epoch + 1e-9)
        self._tell("on_train_begin")
        if self.args.eval_on_start and self.args.eval_strategy != "no" and self.state.global_step == 0:
            self._evaluate()
        self.meter.start()
        with StopRequest() as stop, self._watchdog, _memory_named():
            while self.state.global_step < self.state.max_steps:
                if not self._update(intervals):
                    self._end_of_data(intervals)
                    break
                if self._told_to_end(stop) or self.control.should_training_stop or self.control.should_epoch_stop:
                    break
            self._drain()
        if self._window.last is not None:
            self._log_window()
        if self.args.save_strategy != "no" and self._saved_at != self.state.global_step:
            self._save()
        if self.store is not None:
            self.store.wait()
        self._tell("on_train_end")
        return stop.signal_name

    def _told_to_end(self, stop: StopRequest) -> bool:
        """Whether a signal asks for the end. Several processes compare what they heard at the lines of the log, because
        they must end after the same update."""
        if self.runner.layout.process_count == 1:
            return stop.signal_name is not None
        ends = self.control.should_log and self.runner.any_process(stop.signal_name is not None)
        if ends and stop.signal_name is None:
            stop.signal_name = "a signal to another process"
        return ends

    def _update(self, intervals: Intervals) -> bool:
        """One update and what is due after it; False if the data have ended."""
        state = self.state
        samples = self.batches.samples_next
        waits_for = "the next completions" if samples else "the next batch"
        self._watchdog.begin(state.global_step + 1, waits_for, samples=samples)
        try:
            batch = next(self.batches)
        except StopIteration:
            return False
        if not self._is_in_epoch:  # told only now, because the data may have ended
            self._is_in_epoch = True
            self._tell("on_epoch_begin")
        control = self.control
        control.should_log = control.should_evaluate = control.should_save = False
        self._tell("on_step_begin")
        self._watchdog.begin(state.global_step + 1, "devices")
        self._flying.append(self.runner.step(batch))
        state.global_step += 1
        number, state.epoch = state.global_step, self.batches.epoch
        epoch_ends = math.floor(state.epoch + 1e-9) > self._epochs_ended
        intervals.after_step(control, number)
        while len(self._flying) > AHEAD:
            self._take()
        self._tell("on_step_end", latest=self._window.last)
        if state.global_step == number:  # no spike brought earlier weights back
            self._do_what_is_due()
        epoch_ends |= number == state.max_steps or control.should_training_stop or control.should_epoch_stop
        if epoch_ends and state.global_step == number:  # after a rollback the epoch goes on
            self._end_epoch(intervals)
        return True

    def _end_epoch(self, intervals: Intervals) -> None:
        """Do what is due at the end of an epoch. As in transformers, this comes after what is due by updates, and also
        where a run ends within an epoch."""
        logged = self.control.should_log
        self._is_in_epoch, self._epochs_ended = False, math.floor(self.batches.epoch + 1e-9)
        intervals.after_epoch(self.control)
        self._tell("on_epoch_end")
        self._do_what_is_due()
        self.control.should_log |= logged

    def _end_of_data(self, intervals: Intervals) -> None:
        """Warn that the data ended before the last update, and do what is due at the end of a run."""
        self._drain()
        state, control = self.state, self.control
        if state.is_world_process_zero:
            warnings.warn(
                f"the training data ended after update {state.global_step:,}, but the run was to have "
                f"{state.max_steps:,}, for which the learning rate was planned: an epoch had fewer rows than the first "
                f"one, or a rollback passed over some; max_steps={state.max_steps} reads on in another epoch",
                stacklevel=2,
            )
        control.should_log, control.should_save = True, False
        control.should_evaluate = intervals.evaluation is not None and self._evaluated_at != state.global_step
        self._do_what_is_due()
        if self._is_in_epoch or abs(state.epoch - round(state.epoch)) > 1e-6:
            self._end_epoch(intervals)

    def _do_what_is_due(self) -> None:
        control, step = self.control, self.state.global_step
        if control.should_log or control.should_evaluate or control.should_save:
            self._drain()
        if self.state.global_step < step:  # a spike brought earlier weights back
            return
        if control.should_log:
            self._log_window()
        if control.should_evaluate and self.evaluate is not None:
            self._evaluate()
        if control.should_save:
            self._save()

    def _drain(self) -> None:
        while self._flying:
            self._take()
        self._watchdog.pause()

    def _take(self) -> None:
        """Wait for the oldest update before the devices."""
        number = self.state.global_step - len(self._flying) + 1
        self._watchdog.begin(number, "devices")
        values = self._flying.popleft().values()
        self._watchdog.done(number)
        self._absorb(values, number)

    def _absorb(self, values: StepValues, number: int) -> None:
        """Take in the figures of update `number`, which is done.

        Raises:
            TrainingError: too many updates in a row were skipped.
        """
        self._window.add(values)
        self.meter.add(values.tokens)
        self.state.num_input_tokens_seen += values.tokens
        self.state.total_flos += values.tokens * self.meter.flops_per_token
        if values.skipped:
            self._not_finite += 1
            if self._not_finite >= self.args.nan_limit:
                saved = self._saved_at is not None
                more = "; resume_from_checkpoint=True goes on from the newest checkpoint" if saved else ""
                raise TrainingError(
                    f"{self._not_finite} updates in a row up to step {number} had gradients that are "
                    f"not finite and were skipped, and nan_limit={self.args.nan_limit} ends the run: lower the "
                    f"learning rate, warm up longer, or look at the data{more}."
                )
            return
        self._not_finite = 0
        self._losses_sum += values.loss
        self._losses_count += 1
        self._look_for_spike(values.loss, number)

    def _look_for_spike(self, loss: float, step: int) -> None:
        factor, mean = self.args.loss_spike_factor, self._running_mean
        if factor and mean is not None and loss > factor * mean:
            if self.args.loss_spike_action == "rollback" and self.store is not None and self.store.steps():
                self._flying.clear()
                saved = self.store.restore()
                self._rollbacks += 1
                if self._rollbacks > ROLLBACKS:
                    raise TrainingError(
                        f"the loss of step {step} is {loss:.3g}, more than {factor:g} times its running mean "
                        f"{mean:.3g}, after {ROLLBACKS} rollbacks to the same checkpoint: lower the learning rate, or "
                        "raise loss_spike_factor."
                    )
                self.state.restore(dict(saved["state"]))
                self._window = Window()
                warnings.warn(
                    f"the loss of step {step} is {loss:.3g}, more than {factor:g} times its running mean {mean:.3g}: "
                    f"the weights of step {self.state.global_step} are back, and the data go on after the spike",
                    stacklevel=2,
                )
                return
            warnings.warn(
                f"the loss of step {step} is {loss:.3g}, more than {factor:g} times its running mean {mean:.3g}",
                stacklevel=2,
            )
        self._running_mean = loss if mean is None else SMOOTHING * mean + (1 - SMOOTHING) * loss

    def _log_window(self) -> None:
        window, self._window = self._window, Window()
        last = window.last
        if last is None:
            return
        figures = self.meter.figures()
        compared = self._watchdog.figures(self.runner)
        self.state.train_seconds += figures["step_seconds"] * (len(window.losses) + window.skipped)
        logs: dict[str, Any] = {"loss": window.loss, "grad_norm": last.grad_norm, "learning_rate": last.learning_rate}
        if window.skipped:
            logs["skipped_updates"] = window.skipped
        logs |= window.means()
        if isinstance(self.runner.settings.objective, Reward):
            logs.pop("cross_entropy", None)
        logs |= {} if self.measured is None else self.measured()
        self.log({**logs, **figures, **compared, "num_input_tokens_seen": self.state.num_input_tokens_seen})

    def log(self, logs: dict[str, Any]) -> None:
        """Write a line of the log: into the state's history, and to the callbacks."""
        self._tell("on_log", logs=log_line(self.state, logs))

    def _evaluate(self) -> None:
        """Evaluate and log, while the meter stands still."""
        with self.meter.paused():
            self._measure()

    def _measure(self) -> None:
        assert self.evaluate is not None
        metrics = self._last_metrics = self.evaluate()
        self._evaluated_at = self.state.global_step
        self.log(metrics)
        # Callbacks see the best value of the evaluations before, as in transformers, and compare this one with it.
        self._tell("on_evaluate", metrics=metrics)
        value = metrics.get(self.args.best_metric)
        if value is None:
            if self.args.metric_for_best_model is not None:
                if self.args.save_strategy != "no":
                    self._save()  # so that nothing is lost: the run is resumed with another name
                raise TrainingError(
                    f"metric_for_best_model={self.args.metric_for_best_model!r} was asked for, but an evaluation gives "
                    f"{', '.join(one.removeprefix('eval_') for one in metrics)}: name one of these, or return it from "
                    "compute_metrics."
                )
        elif math.isfinite(value):
            best, greater = self.state.best_metric, self.args.best_is_greatest
            if best is None or (value > best if greater else value < best):
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step
                self.state.best_model_checkpoint = str(self.checkpoint_name(self.state.global_step))

    def _save(self) -> None:
        if self.store is None or self._saved_at == self.state.global_step or self._is_in_the_way():
            return
        metrics = self._last_metrics if self._evaluated_at == self.state.global_step else None
        trainer = {
            "state": self.state.saved(),
            "data": self.batches.state(),
            "running_mean": self._running_mean,
            "arguments": dict(self.arguments),
        }
        self.store.save(self.state.global_step, trainer, metrics)
        self._saved_at, self._rollbacks = self.state.global_step, 0
        self._tell("on_save")

    def _is_in_the_way(self) -> bool:
        """Whether output_dir holds checkpoints of an earlier run, where a callback asks for the first of this one. Runs
        that save by themselves are refused before they begin; this one is warned of once, and goes on."""
        if self.args.save_strategy != "no" or self._saved_at is not None:
            return False
        if self._saves_nothing:
            return True
        steps = steps_in(self.args.folder / CHECKPOINTS)
        self._saves_nothing = self.runner.any_process(bool(steps))
        if self._saves_nothing and self.state.is_world_process_zero:
            warnings.warn(
                f"a callback asks for a checkpoint after update {self.state.global_step:,}, but {self.args.folder} has "
                "checkpoints of an earlier run, with which it would be mixed up: this run writes none; give it another "
                "output_dir",
                stacklevel=2,
            )
        return self._saves_nothing

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from what `store.restore` returned, with a warning for each argument that is not the checkpoint's.

        Raises:
            RequestError: the checkpoint is of another method.
            CheckpointError: it is of other data, whose position means nothing here.
        """
        changed = compare(
            saved.get("arguments", {}), self.arguments, tells=self.state.is_world_process_zero
        )
        self.batches.restore(dict(saved["data"]))
        self.state.restore(dict(saved["state"]))
        best = self.state.best_metric
        if changed & set(BEST) or (best is not None and not math.isfinite(best)):
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        self._running_mean = saved.get("running_mean")
        self._saved_at = self.state.global_step

    def _tell(self, event: str, **more: Any) -> None:
        self.callbacks.call(event, self.args, self.state, self.control, model=self.runner, **more)
