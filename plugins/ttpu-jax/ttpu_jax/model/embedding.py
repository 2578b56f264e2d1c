"""The two ends of a decoder: from tokens to the residual stream, and from it to logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import EmbeddingSpec, HeadSpec
from ttpu_jax.model.modules import Norm, Parameters, Runtime, maybe, value_of
from ttpu_jax.ops.linear import linear


class Embedding(nnx.Module):
    """Token table, with the scale, learned positions and norm that some models add.

    A custom embedding is a class of the same constructor and methods, and may inherit from this one."""

    def __init__(self, spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.placement = spec, runtime.placement
        self.embedding = values["embedding"]
        self.positions = values.get("positions")
        self.norm = Norm(spec.norm, values.at("norm")) if spec.norm else None

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """tokens, positions [batch, seq]: the residual stream [batch, seq, hidden], and what each layer is given beside
        it, [layers, batch, seq, features] or None."""
        return self.look_up(tokens, positions), None

    def look_up(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens, positions [batch, seq]: [batch, seq, hidden]."""
        x = self.placement.constrain_looked_up(jnp.take(self.embedding[...], tokens, axis=0, mode="clip"))
        if self.spec.scale is not None:
            x = x * jnp.asarray(self.spec.scale, x.dtype)
        if self.positions is not None:
            rows = jnp.maximum(positions, 0) + self.spec.position_offset
            x = x + jnp.take(self.positions[...], rows, axis=0, mode="clip")
        return maybe(self.norm, x)

    def collapse(self, x: jax.Array) -> jax.Array:
        """What the last layer leaves, as the one stream [batch, seq, hidden] that the final norm is for."""
        return x


class Head(nnx.Module):
    """From the residual stream to float32 logits."""

    def __init__(self, spec: HeadSpec, values: Parameters) -> None:
        self.spec = spec
        self.kernel, self.bias = values.get("kernel"), values.get("bias")

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """x [..., hidden], table [vocab, hidden] of the embedding: [..., vocab]."""
        kernel = table if self.kernel is None else value_of(self.kernel)
        logits = linear(x, kernel, value_of(self.bias), out_dtype=jnp.dtype(jnp.float32))
        logits = logits if self.spec.multiplier == 1.0 else logits * self.spec.multiplier
        cap = self.spec.softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap


