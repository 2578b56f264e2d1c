"""Per-layer embeddings on JAX: each layer's narrow embedding of each token, and the module that adds it to the
residual stream."""

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
    """The usual embedding, with one embedding per layer beside it."""

    def __init__(self, spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        assert spec.custom is not None
        self.runtime = runtime
        own: PerLayerSpec = spec.custom.option("per_layer")
        self.own, below = own, values.at("per_layer")
        self.table, self.projection = below["embedding"], Linear(below.at("projection"), runtime)
        self.per_layer_norm = Norm(own.norm, below.at("norm"))

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The embedding [batch, seq, hidden], and the per-layer embeddings [layers, batch, seq, features].

        Args:
            tokens: [batch, seq].
            positions: [batch, seq].
        """
        x = self.look_up(tokens, positions)
        return x, self.for_layers(tokens, x)

    def for_layers(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """The per-layer embeddings [layers, batch, seq, features].

        Args:
            tokens: [batch, seq].
            x: [batch, seq, hidden], the usual embedding of the tokens.
        """
        own, constrain = self.own, self.runtime.placement.constrain
        known = jnp.where(tokens < own.vocab_size, tokens, 0)
        rows = jnp.take(self.table[...], known, axis=0, mode="clip")
        rows = constrain(rows * jnp.asarray(own.features**0.5, rows.dtype), *RESIDUAL)
        projected = constrain(self.projection(x) * jnp.asarray(own.hidden_size**-0.5, x.dtype), *RESIDUAL)
        shape = (*tokens.shape, own.layers, own.features)
        both = self.per_layer_norm(projected.reshape(shape)) + rows.reshape(shape)
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, both.dtype), 2, 0)


class PerLayerInput(nnx.Module):
    """The contribution of a layer's own token embedding to the residual stream."""

    def __init__(self, own: PerLayerSpec, values: Parameters, runtime: Runtime) -> None:
        self.activation = own.activation
        self.gate, self.projection = Linear(values.at("gate"), runtime), Linear(values.at("projection"), runtime)
        self.norm = Norm(own.norm, values.at("norm"))

    def __call__(self, x: jax.Array, beside: jax.Array) -> jax.Array:
        """The contribution [batch, seq, hidden].

        Args:
            x: [batch, seq, hidden].
            beside: [batch, seq or more, features], per-layer embeddings of these tokens and of earlier ones.
        """
        gate = activate(self.gate(x, jnp.dtype(jnp.float32)), self.activation)
        gated = (gate * beside[:, -x.shape[1] :]).astype(x.dtype)
        return self.norm(self.projection(gated))
