"""Per-layer embeddings on JAX. In: tokens and their usual embedding; out: each layer's narrow embedding of each token,
and in a layer what it adds to the residual stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import EmbeddingSpec
from ttpu_gemma.per_layer import PerLayerSpec
from ttpu_jax.model.embedding import Embedding
from ttpu_jax.model.modules import RESIDUAL, Linear, Norm, Parameters, Runtime
from ttpu_jax.ops.activation import activate


class PerLayerEmbedding(Embedding):
    """The usual embedding, with each layer's own beside it."""

    def __init__(self, spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        assert spec.custom is not None
        self.runtime = runtime
        own: PerLayerSpec = spec.custom.option("per_layer")
        self.own, below = own, values.at("per_layer")
        self.table, self.projection = below["embedding"], Linear(below.at("projection"), runtime)
        self.per_layer_norm = Norm(own.norm, below.at("norm"))

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """tokens, positions [batch, seq]: [batch, seq, hidden], and [layers, batch, seq, features]."""
        x = self.look_up(tokens, positions)
        return x, self.for_layers(tokens, x)

    def for_layers(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """tokens [batch, seq] and their embedding x [batch, seq, hidden]: [layers, batch, seq, features]."""
        own, constrain = self.own, self.runtime.placement.constrain
        known = jnp.where(tokens < own.vocab_size, tokens, 0)
        rows = jnp.take(self.table[...], known, axis=0, mode="clip")
        rows = constrain(rows * jnp.asarray(own.features**0.5, rows.dtype), *RESIDUAL)
        projected = constrain(self.projection(x) * jnp.asarray(own.hidden_size**-0.5, x.dtype), *RESIDUAL)
        shape = (*tokens.shape, own.layers, own.features)
        both = self.per_layer_norm(projected.reshape(shape)) + rows.reshape(shape)
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, both.dtype), 2, 0)


class PerLayerInput(nnx.Module):
    """What a layer's own embedding of its tokens adds to the residual stream."""

    def __init__(self, own: PerLayerSpec, values: Parameters, runtime: Runtime) -> None:
        self.activation = own.activation
        self.gate, self.projection = Linear(values.at("gate"), runtime), Linear(values.at("projection"), runtime)
        self.norm = Norm(own.norm, values.at("norm"))

    def __call__(self, x: jax.Array, beside: jax.Array) -> jax.Array:
        """x [batch, seq, hidden], beside [batch, seq or more, features] of these tokens and those before them: as x."""
        gate = activate(self.gate(x, jnp.dtype(jnp.float32)), self.activation)
        gated = (gate * beside[:, -x.shape[1] :]).astype(x.dtype)
        return self.norm(self.projection(gated))
