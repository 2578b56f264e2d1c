"""A serving engine on the devices of a training, which reads the trainer's weights. It sleeps during updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from ttpu_core.errors import UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.services import Engines, RolloutEngine
from ttpu_train.runner import TrainRunner


@runtime_checkable
class HandsWeights(Protocol):
    """A `TrainRunner` whose weights an engine can read."""

    def rollout_model(self) -> Any:
        """The model in training, for the service "engine" to build an engine for."""
        ...

    def rollout_weights(self) -> Any:
        """The present weights, for that engine's `update_weights`. Valid until the next update."""
        ...


class LiveEngine:
    """An engine that is built when it is first needed, and has no weights of its own.

    Args:
        runner: of the training.
        options: the engine's settings.
        wanted: what samples, for errors, as in "method='grpo'".

    Attributes:
        options: the engine's settings.
        engine: None before the first use.

    Raises:
        UnsupportedError: the backend's weights cannot be served while they are trained.
    """

    def __init__(self, runner: TrainRunner, options: Mapping[str, Any], wanted: str) -> None:
        if not isinstance(runner, HandsWeights):
            raise UnsupportedError(
                f"{wanted} samples with the weights in training, but this backend gives no engine access to them: use "
                "backend='jax'."
            )
        self._runner: HandsWeights = runner
        self.options = dict(options)
        self.engine: RolloutEngine | None = None

    @contextmanager
    def awake(self) -> Iterator[RolloutEngine]:
        """The engine with the present weights; it sleeps afterwards.

        Raises:
            UnsupportedError: the engine cannot serve the model or its mesh.
            MissingDependencyError: no serving engine is installed.
            RequestError: settings that contradict the model or each other, or too little memory.
        """
        if self.engine is None:
            engines: Engines = default_registry().service("engine")
            config = engines.config(self.options)
            engine = self.engine = cast(RolloutEngine, engines.build(self._runner.rollout_model(), config))
        else:
            engine = self.engine
            engine.update_weights(self._runner.rollout_weights())
            engine.wake_up()
        try:
            yield engine
        finally:
            engine.sleep()

    def close(self) -> None:
        """Free the engine's memory."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
