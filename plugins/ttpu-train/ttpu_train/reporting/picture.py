"""The picture of a run: loss, learning rate, norm of the gradients and throughput over its updates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ttpu_train.callbacks import TrainerCallback, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

NAME = "training.png"
PANELS = (
    ("loss, nats a token", (("loss", "training"), ("eval_loss", "evaluation"))),
    ("learning rate", (("learning_rate", ""),)),
    ("norm of the gradients", (("grad_norm", ""),)),
    ("tokens per second and device", (("tokens_per_second_per_device", ""),)),
)


class PictureReporter(TrainerCallback):
    """Draws the picture when a run ends, if matplotlib is installed."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw."""
        if state.is_world_process_zero and state.log_history and find_spec("matplotlib") is not None:
            try:
                draw(state.log_history, args.folder / NAME, args.run_name or args.folder.name)
            except OSError as error:
                logger.warning("%s was to be drawn, but it cannot be written (%s)", args.folder / NAME, error.strerror)


def draw(history: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the log of a run into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title)
    for axes, (label, curves) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for key, name in curves:
            points = [(line["step"], line[key]) for line in history if key in line]
            if points:
                steps, values = zip(*points, strict=True)
                axes.plot(steps, values, marker="." if len(points) < 30 else "", label=name or None)
        axes.set_xlabel("update")
        axes.set_title(label, fontsize="medium", loc="left")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend()
    figure.savefig(path, dpi=120)
