"""Gemma 3n on JAX: an embedding that makes several residual streams, and a block that computes one stream and
corrects the others by its result (AltUp, arXiv 2301.13310), with a low-rank path beside attention (Laurel, arXiv
2411.07501). Streams are [batch, seq, streams, hidden]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import EmbeddingSpec, LayerSpec, NormSpec
from ttpu_gemma.jax.per_layer import PerLayerEmbedding, PerLayerInput
from ttpu_jax.model.layers import DecoderLayer
from ttpu_jax.model.modules import RESIDUAL, LayerInputs, Linear, Norm, Parameters, Runtime, Step, maybe, value_of
from ttpu_jax.model.step_cache import Keys, StepCache
from ttpu_jax.ops.linear import linear

SMALLEST_POWER = 1e-5  # lower bound on a stream's mean square before a division by its magnitude


class StreamEmbedding(PerLayerEmbedding):
    """Several streams: the embedding, and projections of it with the same magnitude."""

    def __init__(self, spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        self.project = Linear(values.at("altup.project"), runtime)
        self.unembed = values["altup.unembed.kernel"]

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The streams [batch, seq, streams, hidden], and the per-layer embeddings [layers, batch, seq, features].

        Args:
            tokens: [batch, seq].
            positions: [batch, seq].
        """
        x = self.look_up(tokens, positions)
        first = x[:, :, None]
        others = self.runtime.placement.constrain(self.project(x), *RESIDUAL, None)
        return jnp.concatenate([first, _as_large_as(first, others)], axis=2), self.for_layers(tokens, x)

    def collapse(self, x: jax.Array) -> jax.Array:
        """The mean [batch, seq, hidden] of the streams `x`: [batch, seq, streams, hidden]. All streams but the first
        are projected back before."""
        first, kernels = x[:, :, :1], value_of(self.unembed)
        back = [
            linear(x[:, :, 1 + stream], jax.tree.map(lambda array, stream=stream: array[stream], kernels))
            for stream in range(kernels.shape[0])
        ]
        others = self.runtime.placement.constrain(jnp.stack(back, axis=2), *RESIDUAL, None)
        return jnp.concatenate([first, _as_large_as(first, others)], axis=2).mean(2)


class AltUp(nnx.Module):
    """Predicts a layer's streams from the previous ones, and corrects them by the stream that the layer computed."""

    def __init__(self, norm: NormSpec, active: int, values: Parameters, runtime: Runtime) -> None:
        self.active, self.norm = active, Norm(norm, values.at("norm"))
        self.router = Linear(values.at("router"), runtime)
        self.predictor, self.corrector = (Linear(values.at(name), runtime) for name in ("predict", "correct"))
        self.scale = values["scale"]

    def predict(self, x: jax.Array) -> jax.Array:
        """Predicted streams [batch, seq, streams, hidden] for `x`: [batch, seq, streams, hidden]."""
        streams = x.shape[2]
        weights = self.predictor(self._modalities(x[:, :, self.active]), jnp.dtype(jnp.float32))
        weights = weights.reshape(*weights.shape[:2], streams, streams)  # [batch, seq, to, from]
        mixed = (weights[..., None] * x[:, :, None].astype(jnp.float32)).sum(3)
        return mixed.astype(x.dtype) + x

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:
        """Corrected streams [batch, seq, streams, hidden].

        Args:
            predictions: [batch, seq, streams, hidden].
            computed: [batch, seq, hidden], the computed stream.
        """
        weights = self.corrector(self._modalities(computed), jnp.dtype(jnp.float32)) + 1.0
        surprise = (computed - predictions[:, :, self.active]).astype(jnp.float32)
        return (surprise[:, :, None] * weights[..., None]).astype(computed.dtype) + predictions

    def _modalities(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden]: [batch, seq, streams], between -1 and 1."""
        normed = self.norm(x)
        routed = self.router(normed * jnp.asarray(1.0 / x.shape[-1], x.dtype), jnp.dtype(jnp.float32))
        return jnp.tanh(routed).astype(x.dtype)


class Block(DecoderLayer):
    """A decoder layer that computes one of several streams."""

    def __init__(self, spec: LayerSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        custom = spec.block.custom
        assert custom is not None
        self.active, self.scale_active = custom.option("active"), custom.option("scale_active")
        self.altup = AltUp(spec.norm, self.active, values.at("altup"), runtime)
        self.laurel_left = Linear(values.at("laurel.left"), runtime)
        self.laurel_right = Linear(values.at("laurel.right"), runtime)
        self.laurel_norm = Norm(spec.norm, values.at("laurel.norm"))
        self.per_layer = PerLayerInput(custom.option("per_layer"), values.at("per_layer"), runtime)

    def __call__(
        self,
        x: jax.Array,
        step: Step,
        cache: StepCache,
        inputs: LayerInputs | None = None,
    ) -> tuple[jax.Array, StepCache, Keys | None]:
        """Streams [batch, seq, streams, hidden], or those of the last token only; the cache; and the keys and
        values, as in `DecoderLayer`.

        `x`: [batch, seq, streams, hidden]. `inputs` are the layer's inputs beside the streams."""
        assert inputs is not None
        assert inputs.beside is not None
        predictions = self.altup.predict(x)
        normed = maybe(self.input_norm, predictions[:, :, self.active])
        mixed, cache, keys = self.mix(normed, step, cache, inputs)
        if step.last_only:
            predictions, normed = predictions[:, -1:], normed[:, -1:]
        attended = predictions[:, :, self.active] + maybe(self.post_attention_norm, mixed)
        side = normed + self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        computed = self.runtime.placement.constrain((attended + side) * jnp.asarray(2**-0.5, x.dtype), *RESIDUAL)
        computed = self._add(computed, self.feed_forward(computed))
        corrected = self.altup.correct(predictions, computed)
        active = corrected[:, :, self.active]
        if self.scale_active:
            active = active * self.altup.scale[...].astype(active.dtype)
        update = self.per_layer(active, inputs.beside)[:, :, None]
        corrected = jnp.concatenate([corrected[:, :, :1], corrected[:, :, 1:] + update], axis=2)
        return self.runtime.placement.constrain(corrected, *RESIDUAL, None), cache, keys


def _as_large_as(first: jax.Array, others: jax.Array) -> jax.Array:
    """`others` [..., hidden], each scaled to the root mean square of `first` [..., hidden]."""
    wanted = jnp.sqrt(jnp.square(first.astype(jnp.float32)).mean(-1, keepdims=True))
    found = jnp.square(others.astype(jnp.float32)).mean(-1, keepdims=True)
    return (others.astype(jnp.float32) * (wanted / jnp.sqrt(jnp.maximum(found, SMALLEST_POWER)))).astype(first.dtype)
