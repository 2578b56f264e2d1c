"""The embedding, which turns tokens into the residual stream, and the head, which turns the residual stream into
logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import EmbeddingSpec, HeadSpec, axes
from ttpu_jax.model.modules import (
    Linear,
    Norm,
    Parameters,
    Runtime,
    into_layers,
    maybe,
    product_devices,
    ring_of,
    value_of,
)
from ttpu_jax.ops.kernels import QuantizedKernel, rows_of
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.matmul.rings import exchanged_rows, scattered_rows
from ttpu_jax.ops.matmul.trained import trained_product
from ttpu_jax.ops.parts import Part, part


class Embedding(nnx.Module):
    """The token table, with the scale, learned positions and norm that some models add.

    A custom embedding is a class with the same constructor and methods. It may inherit from this one.
    """

    def __init__(self, spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime, self.placement, self.dtype = spec, runtime, runtime.placement, runtime.dtype
        self.embedding = values["embedding"]
        self.table_projection = None if spec.table_features is None else Linear(values.at("projection"), runtime)
        self.positions = values.get("positions")
        self.norm = Norm(spec.norm, values.at("norm"), by_feature=runtime.fuses_norms) if spec.norm else None

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Embed tokens [batch, seq] at positions [batch, seq].

        Returns:
            The residual stream [batch, seq, hidden], and an additional input of each layer [layers, batch, seq,
                features], or None for models that have none.
        """
        return self.look_up(tokens, positions), None

    @part(Part.EMBEDDING)
    def look_up(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Look up tokens [batch, seq] at positions [batch, seq] and return the residual stream [batch, seq, hidden]."""
        x = self._rows(tokens)
        if self.spec.scale is not None:
            x = x * jnp.asarray(self.spec.scale, x.dtype)
        if self.table_projection is not None:
            x = self.table_projection(x)
        if self.positions is not None:
            rows = jnp.maximum(positions, 0) + self.spec.position_offset
            x = x + jnp.take(self.positions[...], rows, axis=0, mode="clip")
        return maybe(self.norm, x)

    def _rows(self, tokens: jax.Array) -> jax.Array:
        """The table's rows [batch, seq, features], which devices that share the table and cut the residual stream
        exchange as they keep them."""
        table, placement = value_of(self.embedding), self.placement
        dtype = self.dtype if isinstance(table, QuantizedKernel) else None
        ring = ring_of(jax.ShapeDtypeStruct((*tokens.shape, table.shape[-1]), self.dtype), self.runtime)
        by_rows, by_features = placement.array_axes(self.embedding.axis_names, table.shape, "the table")
        if ring is not None and dtype is None:
            if (by_rows, by_features) == ((ring.axis,), ()):
                return scattered_rows(table, tokens, ring)
            if (by_rows, by_features) == ((), (ring.axis,)):
                return exchanged_rows(table, tokens, ring)
        x = placement.constrain_looked_up(rows_of(table, tokens, dtype), by_features)
        if by_features == placement.mesh_axes(axes.EMBED, table.shape[1]):
            return x
        # Without the barrier XLA:TPU copies the caches of some layers to VMEM before kernels read them.
        return jax.lax.optimization_barrier(into_layers(x, self.runtime))

    def collapse(self, x: jax.Array) -> jax.Array:
        """Turn the output of the last layer into the input of the final norm, [batch, seq, hidden].

        Here x has the same shape and is returned as it is; a custom embedding with several residual streams combines
        them.
        """
        return x


class Head(nnx.Module):
    """Projects the output of the final norm, or of the projection behind it, to float32 logits."""

    def __init__(self, spec: HeadSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.kernel, self.bias = values.get("kernel"), values.get("bias")

    @part(Part.HEAD)
    def __call__(self, x: jax.Array, table: nnx.Param | None) -> jax.Array:
        """Return logits [..., vocab] for x [..., features], which are `EmbeddingSpec.features`. With tied embeddings
        the weight is table [vocab, features]; None where they are not tied."""
        kernel = table if self.kernel is None else self.kernel
        assert kernel is not None
        logits = self._product(x, kernel)
        logits = logits if self.spec.multiplier == 1.0 else logits * self.spec.multiplier
        cap = self.spec.softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _product(self, x: jax.Array, kernel: nnx.Param) -> jax.Array:
        value, bias, wide = value_of(kernel), value_of(self.bias), jnp.dtype(jnp.float32)
        if not self.runtime.trains or not isinstance(value, jax.Array):
            devices = product_devices(x, kernel, self.runtime)
            return linear(x, value, bias, out_dtype=wide, devices=devices)
        product = trained_product(x, value, wide, None)
        return product if bias is None else product + bias.astype(wide)


