"""One decoder layer as a Flax NNX module: mixer and MLP on the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import NO_MIXER, LayerSpec, MixerSpec, MoESpec
from ttpu_core.spec.parameters import norm_names
from ttpu_jax.model.attention import Attention
from ttpu_jax.model.cache import BothCaches
from ttpu_jax.model.custom import CachingMixer, custom_mixer
from ttpu_jax.model.modules import (
    MLP,
    LayerInputs,
    Norm,
    Parameters,
    Runtime,
    Step,
    Stream,
    WithShortcut,
    constrain_stream,
    maybe,
)
from ttpu_jax.model.step_cache import Keys, NoCache, StepCache
from ttpu_jax.ops.parts import Part, part


class DecoderLayer(nnx.Module):
    """Mixer and MLP on the residual stream, with norms where the placement puts them.

    A custom block is a class of the same constructor and call, and may inherit from this one: it replaces the call, or
    only one of its steps (`enter`, `mix`, `feed_forward`, `leave`)."""

    def __init__(self, spec: LayerSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        present = norm_names(spec)

        def norm(name: str) -> Norm | None:
            return Norm(spec.norm, values.at(name), by_feature=runtime.fuses_norms) if name in present else None

        self.input_norm, self.post_attention_norm = norm("input_norm"), norm("post_attention_norm")
        self.mlp_norm, self.post_mlp_norm = norm("mlp_norm"), norm("post_mlp_norm")
        if spec.mixer == NO_MIXER:
            pass
        elif isinstance(spec.mixer, MixerSpec):
            self.mixer = custom_mixer(spec.mixer, values.at("mixer"), runtime)
        else:
            self.attention = Attention(spec.mixer, values.at("attention"), runtime)
        beside = spec.block.beside
        self.beside = None if beside is None else custom_mixer(beside, values.at("mixer"), runtime)
        self.mlp: Any
        if isinstance(spec.mlp, MoESpec):
            from ttpu_jax.model.moe import MoE
            self.mlp = MoE(spec.mlp, values.at("moe"), runtime)
        else:
            self.mlp = MLP(spec.mlp, values.at("mlp"), runtime) if spec.mlp else None
        self.layer_scalar = values.get("layer_scalar")

    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: StepCache,
        inputs: LayerInputs | None = None,
    ) -> tuple[Stream, StepCache, Keys | None]:
        """x [batch, seq, hidden]: the same shape (or the last token's, [batch, 1, hidden]), the updated cache, and
        the keys and values that the mixer attended to, if it is attention."""
        if self.spec.mixer == NO_MIXER:
            return self.leave(self._after_mlp(x[:, -1:] if step.last_only else x), inputs), cache, None
        entered = self.enter(x, inputs)
        mixed, cache, keys = self.mix(entered, step, cache, inputs)
        after = self.spec.block.placement == "post_residual"
        mixed = mixed if after else maybe(self.post_attention_norm, mixed)
        if step.last_only:
            x, entered = x[:, -1:], entered[:, -1:]
        stream = entered if self.spec.block.normed_residual else x
        if self.spec.block.placement.startswith("parallel"):
            inner = entered if self.spec.block.placement == "parallel" else maybe(self.mlp_norm, x)
            x = self._add(stream, mixed + self.mlp(inner) if self.mlp else mixed)
        else:
            x = self._add(stream, mixed)
            if isinstance(self.spec.mlp, MoESpec) and self.spec.mlp.shortcut:
                return self._with_shortcut(x, inputs), cache, keys
            x = self._after_mlp(maybe(self.post_attention_norm, x) if after else x)
        return self.leave(x, inputs), cache, keys

    def enter(self, x: jax.Array, inputs: LayerInputs | None) -> jax.Array:
        """What the mixer reads of the residual stream x [batch, seq, hidden], and of the embedding of the tokens if it
        reads that too: [batch, seq, `LayerSpec.mixer_inputs`]."""
        if self.spec.block.reads_embedding:
            assert inputs is not None and inputs.embedding is not None
            x = jnp.concatenate([x, inputs.embedding], axis=-1)
        return maybe(self.input_norm, x)

    def mix(
        self,
        x: jax.Array,
        step: Step,
        cache: StepCache,
        inputs: LayerInputs | None = None,
    ) -> tuple[jax.Array, StepCache, Keys | None]:
        """The mixer of x [batch, seq, hidden], the updated cache, and attention's keys and values."""
        if self.beside is not None:
            keys_of, states_of = keys_and_states(cache)
            mixed, keys_of, keys = self.attention(x, step, keys_of, inputs.keys if inputs else None)
            with part(Part.MIXER):
                other, states_of = states_of.recur(self.beside, x, step)
            return mixed + (other[:, -1:] if step.last_only else other), both_caches(keys_of, states_of), keys
        if not isinstance(self.spec.mixer, MixerSpec):
            return self.attention(x, step, cache, inputs.keys if inputs else None)
        with part(Part.MIXER):
            if isinstance(self.mixer, CachingMixer):
                mixed, cache = self.mixer(x, step, cache)
            else:
                mixed, cache = cache.recur(self.mixer, x, step)
        return (mixed[:, -1:] if step.last_only else mixed), cache, None

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Return the MLP's output for x [batch, seq, hidden] after the mixer, with the norms before and after it."""
        return maybe(self.post_mlp_norm, self.mlp(maybe(self.mlp_norm, x)))

    def leave(self, x: jax.Array, inputs: LayerInputs | None) -> jax.Array:
        """Turn x [batch, seq, hidden] after both sub-layers into the next layer's input. After `step.last_only` it has
        one token where `inputs` have all."""
        return x if self.layer_scalar is None else x * self.layer_scalar[...]

    def _after_mlp(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden] and what the MLP, if there is one, adds to it."""
        if self.mlp is None:
            return x
        if self.spec.block.placement == "post_residual":
            return maybe(self.post_mlp_norm, self._add(x, self.mlp(x), of_mlp=True))
        stream = maybe(self.mlp_norm, x) if self.spec.block.normed_residual else x
        return self._add(stream, self.feed_forward(x), of_mlp=True)

    def _with_shortcut(self, x: jax.Array, inputs: LayerInputs | None) -> WithShortcut:
        """x [batch, seq, hidden] and what the dense MLP adds to it, beside what the experts give."""
        inner = maybe(self.mlp_norm, x)
        after = x if self.mlp.dense is None else self._add(x, self.mlp.dense(inner), of_mlp=True)
        return WithShortcut(self.leave(after, inputs), constrain_stream(self.mlp.routed(inner), self.runtime))

    @part(Part.RESIDUAL)
    def _add(self, x: jax.Array, update: jax.Array, of_mlp: bool = False) -> jax.Array:
        block = self.spec.block
        multiplier = block.residual_multiplier
        if of_mlp and block.mlp_residual_multiplier is not None:
            multiplier = block.mlp_residual_multiplier
        x = _times(x, block.skip_multipliers[of_mlp]) + _times(update, multiplier)
        return constrain_stream(x, self.runtime)


def run_layer(
    layer: Any, x: Stream, step: Step, cache: StepCache, inputs: LayerInputs | None = None
) -> tuple[Stream, StepCache, Keys | None]:
    """Run a layer, and add what the layer before it has left for behind it.

    Args:
        layer: a `DecoderLayer` or custom block.
        x: [batch, seq, hidden], perhaps with what the layer before has left.
        step: as for `DecoderLayer`.
        cache: of this layer.
        inputs: of this layer.

    Returns:
        As `DecoderLayer`, perhaps with what this layer leaves.
    """
    if not isinstance(x, WithShortcut):
        found: tuple[Stream, StepCache, Keys | None] = layer(x, step, cache, inputs)
        return found
    after, cache, keys = layer(x.stream, step, cache, inputs)
    late = x.shortcut[:, -1:] if step.last_only else x.shortcut
    return after + late, cache, keys


def _times(x: jax.Array, multiplier: float) -> jax.Array:
    return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)


def keys_and_states(cache: StepCache) -> tuple[StepCache, StepCache]:
    """The cache of a layer's attention, and that of the mixer beside it."""
    if isinstance(cache, NoCache):
        return cache, cache
    return replace(cache, held=cache.held.keys), replace(cache, held=cache.held.states)


def both_caches(keys: StepCache, states: StepCache) -> StepCache:
    """The reverse of `keys_and_states`."""
    if isinstance(keys, NoCache) or isinstance(states, NoCache):
        return keys
    return replace(keys, held=BothCaches(keys.held, states.held))
