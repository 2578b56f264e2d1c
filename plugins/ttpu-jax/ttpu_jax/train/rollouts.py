"""The weights of a run in training as a serving engine reads them. What the engine can read where the trainer holds it
is handed over by reference; the rest is converted, and freed when the engine sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import ArchitectureSpec, Parameter, axes
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.modules import Runtime
from ttpu_jax.params.placement import Placement
from ttpu_jax.params.quantized import shardings_of
from ttpu_jax.train.zero import spread

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.train.adapters import Adapters


DIVIDING = (axes.Q_HEADS, axes.MLP, axes.EMBED, axes.EXPERT)
"""Logical axes of weights: mesh axes that divide none of them are idle in an engine."""


@dataclass(frozen=True)
class HandedWeights:
    """Weights that an engine's `update_weights` takes without copying them.

    Attributes:
        params: stacked path → array, quantized kernel, or kernel with the adapters in training.
        converted: the paths whose weights are copies that nobody else reads; the others are the trainer's own.
        own: all arrays that nobody else reads: copies, and what is made of adapters.
    """

    params: Mapping[str, Any]
    converted: frozenset[str]
    own: tuple[jax.Array, ...] = ()


@dataclass(frozen=True, eq=False)
class RolloutModel:
    """A model whose weights a trainer holds, as `ttpu_serve.runner.ServedModel`.

    Attributes:
        source: the loaded model whose weights the trainer took over.
        dtype: that the engine computes in; parameters whose table names a dtype keep it.
        weights: the present ones.
        runtime: of the engine.
    """

    source: JaxCausalLM
    dtype: np.dtype[Any]
    weights: HandedWeights
    runtime: Runtime

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
        model: the loaded model: its mesh is the engine's. Devices that hold the same weights for different rows hold
            different parts of them in the engine.
        dtype: that the engine computes in.
        held: where the trainer's weights lie.
        adapters: that are trained beside them, if any.
    """

    model: JaxCausalLM
    dtype: np.dtype[Any]
    held: Placement
    adapters: Adapters | None = None

    @cached_property
    def _table(self) -> Mapping[str, Parameter]:
        return stacked_parameters(self.model.programs.spec)

    @cached_property
    def _placement(self) -> Placement:
        placement = self.model.programs.runtime.placement
        dividing = {axis for name in DIVIDING for axis in placement.axes_of(name)}
        return placement if dividing.issuperset(placement.axes_of(axes.BATCH)) else spread(placement)

    @cached_property
    def _shardings(self) -> Mapping[str, Any]:
        return {path: shardings_of(self._placement, path, parameter) for path, parameter in self._table.items()}

    def weights(self, params: Mapping[str, Any]) -> HandedWeights:
        """The weights as the engine reads them.

        Args:
            params: stacked path → the trainer's array or quantized kernel, and the adapters' arrays by name. Weights of
                the engine's dtype and sharding are given as they are.
        """
        weights = {path: params[path] for path in self._table}
        others = {path: value for path, value in weights.items() if not self._fits(path, value)}
        converted = self._convert(others) if others else {}
        weights |= converted
        adapters = {} if self.adapters is None else self._adapters(dict(params))
        # What the program gave back as it came is the trainer's own array, which an engine must not free.
        held = {id(array) for array in jax.tree.leaves(dict(params))}
        adapters = jax.tree.map(lambda array: jnp.copy(array) if id(array) in held else array, adapters)
        weights |= {path: replace(kernel, base=weights[path]) for path, kernel in adapters.items()}
        return HandedWeights(weights, frozenset(converted), tuple(jax.tree.leaves((converted, adapters))))

    @cached_property
    def _adapters(self) -> Any:
        """The program that makes the adapters of each kernel, without the kernel."""
        assert self.adapters is not None
        return jax.jit(partial(self.adapters.served, placement=self.held, dtype=self.dtype))

    def _fits(self, path: str, value: Any) -> bool:
        if isinstance(value, jax.Array) and value.dtype != self._dtype(path):
            return False
        pairs = zip(jax.tree.leaves(value), jax.tree.leaves(self._shardings[path]), strict=True)
        return all(array.sharding.is_equivalent_to(sharding, array.ndim) for array, sharding in pairs)

    def _dtype(self, path: str) -> np.dtype[Any]:
        own = self._table[path].dtype
        return self.dtype if own is None else np.dtype(own)

    @cached_property
    def _programs(self) -> dict[frozenset[str], Any]:
        return {}

    def _convert(self, params: Mapping[str, Any]) -> dict[str, Any]:
        key = frozenset(params)
        if key not in self._programs:

            def converted(params: dict[str, Any]) -> dict[str, Any]:
                return {
                    path: value.astype(self._dtype(path)) if isinstance(value, jax.Array) else value
                    for path, value in params.items()
                }

            self._programs[key] = jax.jit(converted, out_shardings={path: self._shardings[path] for path in params})
        result: dict[str, Any] = self._programs[key](dict(params))
        return result

    def rollout_model(self, params: Mapping[str, Any]) -> RolloutModel:
        """The model that an engine is built for."""
        runtime = replace(self.model.programs.runtime, placement=self._placement)
        return RolloutModel(self.model, self.dtype, self.weights(params), runtime)
