"""Gemma 4's block on JAX: the shared decoder's block with experts that have their own norms beside the dense MLP,
and a per-layer embedding that is added before the layer's factor."""

from __future__ import annotations

import jax

from ttpu_core.spec import LayerSpec, MoESpec
from ttpu_gemma.jax.per_layer import PerLayerInput
from ttpu_jax.model.layers import DecoderLayer
from ttpu_jax.model.modules import LayerInputs, Norm, Parameters, Runtime, maybe


class Block(DecoderLayer):
    """A decoder layer with the additions of `gemma4_block`."""

    def __init__(self, spec: LayerSpec, values: Parameters, runtime: Runtime) -> None:
        super().__init__(spec, values, runtime)
        assert spec.block.custom is not None
        own, norm = spec.block.custom.option("per_layer"), spec.block.custom.option("norm")
        self.per_layer = PerLayerInput(own, values.at("per_layer"), runtime) if own else None
        self.has_experts = isinstance(spec.mlp, MoESpec)
        if self.has_experts:
            self.dense_post_norm = Norm(norm, values.at("dense_post_norm"))
            self.experts_norm = Norm(norm, values.at("experts_norm"))
            self.experts_post_norm = Norm(norm, values.at("experts_post_norm"))

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """The sum [batch, seq, hidden] of the dense MLP and the experts for `x`: [batch, seq, hidden]. The router
        reads x without a norm before it."""
        if not self.has_experts:
            return super().feed_forward(x)
        dense = self.dense_post_norm(self.mlp.dense(maybe(self.mlp_norm, x)))
        chosen, weights = self.mlp.router(x)
        experts = self.experts_post_norm(self.mlp.experts(self.experts_norm(x), chosen, weights))
        return maybe(self.post_mlp_norm, dense + experts)

    def leave(self, x: jax.Array, inputs: LayerInputs | None) -> jax.Array:
        """`x`: [batch, seq, hidden] plus the per-layer embedding, times the layer's factor. The result is [batch,
        seq, hidden]."""
        if self.per_layer is not None and inputs is not None and inputs.beside is not None:
            x = self._add(x, self.per_layer(x, inputs.beside))
        return super().leave(x, inputs)
