"""Traces chosen updates with the backend's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ttpu_core.errors import UnsupportedError
from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

FOLDER = "profile"
"""The folder of traces, in a run's output_dir."""


@runtime_checkable
class Profiles(Protocol):
    """A runner whose backend has a profiler."""

    def start_trace(self, folder: Path) -> None:
        """Begin to trace, into a folder."""
        ...

    def stop_trace(self) -> None:
        """Wait for the devices and write the trace."""
        ...


class ProfileCallback(TrainerCallback):
    """Traces the updates from `first` to `last`, counted from 1.

    Args:
        first: the first update that is traced.
        last: the last.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._tracing: Profiles | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse a backend without a profiler.

        Raises:
            UnsupportedError: it has none.
        """
        if not isinstance(kwargs["model"], Profiles):
            raise UnsupportedError(
                f"profile_steps={args.profile_steps!r} was given, but this backend's runner has no profiler: leave it "
                "out, or use backend='jax'."
            )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin the trace with the first update of the range that this run computes."""
        if self._tracing is None and self._first <= state.global_step + 1 <= self._last:
            self._tracing = kwargs["model"]
            layout = kwargs["model"].layout
            own = f"process_{layout.process_index}" if layout.process_count > 1 else ""
            self._tracing.start_trace(args.folder / FOLDER / own)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the trace after the last."""
        if state.global_step >= self._last:
            self._stop()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the trace of a run that ends earlier."""
        self._stop()

    def _stop(self) -> None:
        if self._tracing is not None:
            self._tracing.stop_trace()
            self._tracing = None
