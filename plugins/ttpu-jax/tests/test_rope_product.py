"""Ropes as products, which TPUs run, give to the last bit what slices give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.rope import rope_angles, rotate
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement

POSITIONS = jnp.arange(12, dtype=jnp.int32)[None] * 37
BFLOAT16 = np.dtype(jnp.bfloat16)


def rope(dim: int, layout: str) -> RopeSpec:
    return RopeSpec(type="default", theta=10_000.0, rotary_dim=dim, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [32, 12])
@pytest.mark.parametrize("between", [(), (3,), (2, 3)], ids=str)
def test_a_product_turns_as_slices_do(layout: str, rotary_dim: int, between: tuple[int, ...]) -> None:
    spec = rope(rotary_dim, layout)
    x = jax.random.normal(jax.random.key(0), (1, 12, *between, 32), jnp.bfloat16)
    cos, sin = rope_angles(spec, POSITIONS, jnp.array([500]))
    sliced, product = (
        jax.jit(lambda x, by=by: rotate(x, cos, sin, spec, by_product=by))(x) for by in (False, True)
    )
    assert product.dtype == sliced.dtype == jnp.bfloat16
    np.testing.assert_array_equal(product.astype(np.float32), sliced.astype(np.float32))
    assert not np.array_equal(sliced.astype(np.float32), x.astype(np.float32))


def test_other_dtypes_are_sliced() -> None:
    spec = rope(32, "half")
    cos, sin = rope_angles(spec, POSITIONS, jnp.array([500]))
    x = jax.random.normal(jax.random.key(0), (1, 12, 32), jnp.float32)
    text = str(jax.make_jaxpr(lambda x: rotate(x, cos, sin, spec, by_product=True))(x))
    assert "dot_general" not in text


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},  # norms of queries and keys
    "gemma3_text": {"head_dim": 16},  # whose scales are added to 1
    "olmo2": {},  # norms over all heads
    "hunyuan_v1_dense": {"head_dim": 16},  # normed after they are turned
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.1},  # interleaved pairs
    "gpt_neox": {"rotary_pct": 0.25, "layer_norm_eps": 1e-5},  # a part of the features
    "olmo": {"clip_qkv": 0.5},  # clipped before it is turned
}



@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_model_computes_the_same_with_products(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict({"model_type": model_type, **SMALL, **CONFIGS[model_type]})
    spec = default_registry().architecture(config).spec
    placement = local_placement(None)
    runtime = Runtime(placement, "eager", different_ropes(spec.layers), dtype=BFLOAT16)
    model = causal_model(spec, runtime)
    params = random_parameters(model.parameters, placement, BFLOAT16, seed=1)
    for number, path in enumerate(path for path in sorted(params) if path.endswith("norm.scale")):
        params[path] = jax.random.normal(jax.random.key(number), params[path].shape, BFLOAT16)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]

    def logits() -> np.ndarray:
        run = jax.jit(lambda params: model.module(params)(tokens, tokens)[0])
        return np.asarray(run(params), np.float32)

    def products() -> int:
        jaxpr = jax.make_jaxpr(lambda params: model.module(params)(tokens, tokens)[0])(params)
        return str(jaxpr).count("dot_general")

    sliced, dots = logits(), products()
    monkeypatch.setattr(Runtime, "rotates_by_product", True)
    jax.clear_caches()  # layers that were traced
    np.testing.assert_array_equal(logits(), sliced)
    apart = model_type in ("olmo2", "hunyuan_v1_dense")
    assert products() - dots == (2 if apart else 1)  # of a layer that is traced once


def test_only_programs_for_tpus_have_products() -> None:
    assert not Runtime(local_placement(None)).rotates_by_product
