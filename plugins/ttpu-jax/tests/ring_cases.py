"""Layers and models whose rows the devices of a ring exchange."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ttpu_core.spec import (
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    OutputGate,
    RouterSpec,
)
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.matmul.rings import StreamForm
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import local_placement

VOCAB, SEQ = 67, 16
ROPE, NORM = RopeSpec(rotary_dim=8), NormSpec()
OFFSET = NormSpec(offset=1.0)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=tolerance * scale)


EXPERTS = MoESpec(4, 2, 16, router=RouterSpec())
GQA = AttentionSpec(14, 2, 8, rope=ROPE, qkv_bias=True, output_bias=True, sinks=True)
LAYERS = {
    "fewer KV heads than devices, with biases": LayerSpec(GQA, MLPSpec(21, bias=True), NORM),
    "norms behind the sub-layers too, and soft caps": LayerSpec(
        AttentionSpec(8, 4, 8, rope=ROPE, logit_softcap=30.0, window=5),
        MLPSpec(24, ActivationSpec("gelu_tanh")),
        OFFSET,
        BlockSpec("sandwich"),
    ),
    "norms of heads and an MLP without a gate": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE, q_norm=NORM, k_norm=NORM, qk_norm_scope="full"),
        MLPSpec(16, ActivationSpec("gelu"), gated=False, bias=True),
        NORM,
    ),
    "values of another size and gates of features": LayerSpec(
        AttentionSpec(6, 2, 8, v_head_dim=6, rope=ROPE, qkv_bias=True, output_gate=OutputGate(bias=True)),
        MLPSpec(9),
        NORM,
    ),
    "inner features that depend on each other": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE), MLPSpec(16, sparsity=0.5), NORM
    ),
    "a norm of inner features": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE), MLPSpec(16, inner_norm=NORM), NORM
    ),
    "a learned activation": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE), MLPSpec(16, ActivationSpec("xielu"), gated=False), NORM
    ),
    "experts": LayerSpec(AttentionSpec(8, 8, 8, rope=ROPE), EXPERTS, NORM),
    "experts beside a shared one and a dense MLP": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE),
        replace(EXPERTS, shared=MLPSpec(8), shared_gate=True, dense=MLPSpec(16), expert_bias=True),
        NORM,
        BlockSpec("sandwich"),
    ),
    "no MLP": LayerSpec(AttentionSpec(8, 8, 8, rope=ROPE), None, NORM),
    "sub-layers side by side": LayerSpec(
        AttentionSpec(8, 8, 8, rope=ROPE),
        MLPSpec(16),
        NORM,
        BlockSpec("parallel"),
    ),
}


def architecture(*layers: LayerSpec) -> ArchitectureSpec:
    return ArchitectureSpec("tiny", EmbeddingSpec(VOCAB, 12), layers, NORM, HeadSpec(softcap=20.0), 64)


class Model:
    """A decoder over random parameters, which are the same on every mesh."""

    def __init__(
        self,
        spec: ArchitectureSpec,
        mesh: str | None,
        stream: StreamForm = "rings",
        without: frozenset[Optimization] = frozenset(),
    ) -> None:
        placement = local_placement(mesh)
        self.spec, paddings = pad_for(spec, placement)
        self.model: DecoderModel = causal_model(
            self.spec, Runtime(placement, ropes=different_ropes(spec.layers), stream=stream, without=without)
        )
        random = np.random.default_rng(3)
        self.params = {}
        for path, parameter in spec.parameters.items():
            value = random.standard_normal(parameter.shape).astype(np.float32) * 0.3
            value = 1 + 0.1 * value if parameter.init == "ones" else value
            value = paddings[path].pad(value) if path in paddings else value
            self.params[path] = jax.device_put(value, placement.parameter(path, self.spec.parameters[path]))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        run = jax.jit(lambda params, tokens: self.model.forward(params, tokens, positions)[0])
        return np.asarray(run(self.params, tokens))[..., :VOCAB]

    def prefill(self, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """The last token's logits, the cache, and the logits of a decode step with it."""
        cache = self.model.empty_cache(len(tokens), tokens.shape[1] + 1, np.dtype(np.float32))
        last, cache = jax.jit(partial(self.model.forward, last_only=True, fresh=True))(
            self.params, tokens, cache=cache
        )
        held = [np.asarray(leaf) for leaf in jax.tree.leaves(cache.layers)]  # type: ignore[union-attr]
        following = jax.jit(self.model.forward)(self.params, tokens[:, -1:], cache=cache)[0]
        return np.asarray(last)[..., :VOCAB], held, np.asarray(following)[..., :VOCAB]

    def text(self, tokens: np.ndarray) -> str:
        """The traced program."""
        return str(jax.make_jaxpr(self.model.forward)(self.params, tokens, tokens))


def tokens(batch: int = 2, seq: int = SEQ) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (batch, seq)).astype(np.int32)
