"""The runner of an engine whose weights a trainer holds on the same devices. Between rollouts it sleeps: it holds no
weights and no pages then, so that updates have all of the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.model.modules import Runtime
from ttpu_jax.runner.build import filled, refuse_idle_devices, runner_for
from ttpu_jax.runner.compilation_cache import keep_compiled
from ttpu_jax.runner.executable_cache import ExecutableCache
from ttpu_jax.runner.runner import Runner

if TYPE_CHECKING:
    from ttpu_jax.train.rollouts import HandedWeights
    from ttpu_serve.api.engine_config import EngineConfig


class RolloutRunner(Runner):
    """Reads the arrays that a trainer hands over. `own` are those that nobody else reads."""

    own: tuple[jax.Array, ...] = ()

    def sleep(self) -> None:
        """Drop the weights and the pages. Nothing is kept on the host: the trainer hands the weights over again."""
        self._free()
        self.params = {}
        self.release()

    def _free(self) -> None:
        for array in self.own:
            array.delete()
        self.own = ()

    def wake_up(self) -> None:
        """Make empty pages for the weights that were handed over.

        Raises:
            RequestError: none were.
        """
        if not self.params:
            raise RequestError(
                "an engine of a run in training was woken up without weights, but it keeps none while it sleeps: call "
                "update_weights() with what the trainer hands over first."
            )
        self.allocate(self.num_pages)

    @contextmanager
    def weight_update(self, weights: str | Path | Mapping[str, Any] | HandedWeights) -> Iterator[Callable[[], None]]:
        """Take weights over as a context manager, awake or asleep; its value is a function that puts them in place.

        Raises:
            RequestError: they are not what the trainer hands over.
        """
        params = getattr(weights, "params", None)
        if params is None:
            raise RequestError(
                f"the weights of an engine of a run in training were to be updated from {type(weights).__name__}, but "
                "it reads the arrays of its trainer alone: pass what the trainer's runner hands over."
            )

        def replace_all() -> None:
            self._free()
            self.params, self.own = dict(params), weights.own  # type: ignore[union-attr]

        yield replace_all


def rollout_runner(
    spec: ArchitectureSpec, runtime: Runtime, weights: HandedWeights, dtype: np.dtype[Any], config: EngineConfig
) -> RolloutRunner:
    """Make the runner of an engine for a run in training, without compiling programs or making caches.

    Args:
        spec: padded for the mesh.
        runtime: of the loaded model.
        weights: the present ones, stacked.
        dtype: that the engine computes in.
        config: the engine's settings, as the caller gave them.

    Raises:
        UnsupportedError: a model, or a mesh, that the engine cannot serve.
        RequestError: settings that contradict the model or each other.
    """
    refuse_idle_devices(runtime.placement)
    keep_compiled()
    if config.adapters or config.max_adapters:
        raise RequestError(
            "adapters were asked for in an engine of a run in training, but it serves the weights in training alone: "
            "leave them out."
        )
    config = filled(config, spec, runtime.placement.platform)
    runner = runner_for(
        spec, replace(runtime, dtype=dtype), weights.params, config, dtype, kind=RolloutRunner, slices=True
    )
    assert isinstance(runner, RolloutRunner)
    runner.own = weights.own
    runner.pool.store = ExecutableCache(runtime.placement.devices)
    return runner
