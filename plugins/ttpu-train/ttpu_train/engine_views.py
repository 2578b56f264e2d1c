"""What loops written for DeepSpeed read of an engine's optimizer and schedule, which are part of its compiled
update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ttpu_core.errors import UnsupportedError

if TYPE_CHECKING:
    from ttpu_train.engine import Engine


class EngineOptimizer:
    """What DeepSpeed's loops read of an optimizer. Gradients exist only within an update.

    Args:
        engine: whose optimizer it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group with the settings of the run; `lr` is that of the last update."""
        settings = self._engine.runner.settings.optimizer
        group = {"lr": self._engine.get_lr()[0], "weight_decay": settings.weight_decay, "eps": settings.epsilon}
        return [{**group, "betas": (settings.beta1, settings.beta2)}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients of an update end with it."""

    def step(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "optimizer.step() was called, but the optimizer is part of the engine's compiled update: call "
            "engine.step() alone."
        )


class EngineSchedule:
    """What DeepSpeed's loops read of a schedule. The learning rate follows the number of the update.

    Args:
        engine: whose learning rate it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last update; before the first, the peak."""
        return self._engine.get_lr()

    def step(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "lr_scheduler.step() was called, but the schedule is part of the engine's compiled update: call "
            "engine.step() alone."
        )
