"""The weights of a run in training as a serving engine reads them. What the engine can read where the trainer holds it
is handed over by reference; the rest is converted, and freed when the engine sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_core.spec.parameters import stacked_parameters

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM


@dataclass(frozen=True)
class HandedWeights:
    """Weights that an engine's `update_weights` takes without copying them.

    Attributes:
        params: stacked path → array.
        converted: the paths whose arrays are copies that nobody else reads; the others are the trainer's own.
    """

    params: Mapping[str, jax.Array]
    converted: frozenset[str]


@dataclass(frozen=True, eq=False)
class RolloutModel:
    """A model whose weights a trainer holds, as `ttpu_serve.runner.ServedModel`.

    Attributes:
        source: the loaded model whose weights the trainer took over.
        dtype: that the engine computes in; parameters whose table names a dtype keep it.
        weights: the present ones.
    """

    source: JaxCausalLM
    dtype: np.dtype[Any]
    weights: HandedWeights

    backend = "jax"

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.source.name

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, or None."""
        return self.source.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.source.stop_ids

    @property
    def spec(self) -> ArchitectureSpec:
        """The unpadded architecture."""
        return self.source.spec


@dataclass(frozen=True, eq=False)
class Handover:
    """How the weights of a run become an engine's.

    Attributes:
        model: the loaded model: its mesh is the engine's.
        dtype: that the engine computes in.
    """

    model: JaxCausalLM
    dtype: np.dtype[Any]

    @cached_property
    def _table(self) -> Mapping[str, Parameter]:
        return stacked_parameters(self.model.programs.spec)

    @cached_property
    def _shardings(self) -> Mapping[str, Sharding]:
        placement = self.model.programs.runtime.placement
        return {path: placement.parameter(path, parameter) for path, parameter in self._table.items()}

    def weights(self, params: Mapping[str, jax.Array]) -> HandedWeights:
        """The weights as the engine reads them.

        Args:
            params: stacked path → the trainer's array. Those of the engine's dtype and sharding are given as they are.
        """

        def fits(path: str, value: jax.Array) -> bool:
            return value.dtype == self._dtype(path) and value.sharding.is_equivalent_to(
                self._shardings[path], value.ndim
            )

        others = {path: value for path, value in params.items() if not fits(path, value)}
        converted = self._convert(others) if others else {}
        return HandedWeights({**params, **converted}, frozenset(converted))

    def _dtype(self, path: str) -> np.dtype[Any]:
        own = self._table[path].dtype
        return self.dtype if own is None else np.dtype(own)

    @cached_property
    def _programs(self) -> dict[frozenset[str], Any]:
        return {}

    def _convert(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        key = frozenset(params)
        if key not in self._programs:

            def converted(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
                return {path: value.astype(self._dtype(path)) for path, value in params.items()}

            self._programs[key] = jax.jit(converted, out_shardings={path: self._shardings[path] for path in params})
        result: dict[str, jax.Array] = self._programs[key](dict(params))
        return result

    def rollout_model(self, params: Mapping[str, jax.Array]) -> RolloutModel:
        """The model that an engine is built for."""
        return RolloutModel(self.model, self.dtype, self.weights(params))
