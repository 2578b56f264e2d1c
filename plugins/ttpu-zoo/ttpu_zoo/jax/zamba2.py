"""Zamba2's hybrid block on JAX: attention and MLP without residuals, a projection, and a state space that reads the
stream and that projection's result."""

from __future__ import annotations

from dataclasses import replace

import jax

from ttpu_core.spec import LayerSpec
from ttpu_jax.model.layers import DecoderLayer, both_caches, keys_and_states
from ttpu_jax.model.modules import LayerInputs, Linear, Norm, Parameters, Runtime, Step
from ttpu_jax.model.step_cache import Keys, StepCache


class Block(DecoderLayer):
    """A state space whose input a transformer block has changed. The stream itself passes the transformer block by."""

    def __init__(self, spec: LayerSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        self.projection = Linear(values.at("projection"), runtime)
        self.mixer_norm = Norm(spec.norm, values.at("mixer_norm"))

    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: StepCache,
        inputs: LayerInputs | None = None,
    ) -> tuple[jax.Array, StepCache, Keys | None]:
        """x [batch, seq, hidden]: the same shape (or the last token's, [batch, 1, hidden]), the updated cache, and the
        keys and values that were attended to."""
        assert self.beside is not None
        keys_of, states_of = keys_and_states(cache)
        # The state space reads all tokens, even where the last one's output alone is wanted.
        attended, keys_of, keys = self.attention(self.enter(x, inputs), replace(step, last_only=False), keys_of)
        entered = self.mixer_norm(x + self.projection(self.feed_forward(attended)))
        mixed, states_of = states_of.recur(self.beside, entered, step)
        if step.last_only:
            x, mixed = x[:, -1:], mixed[:, -1:]
        return self._add(x, mixed), both_caches(keys_of, states_of), keys
