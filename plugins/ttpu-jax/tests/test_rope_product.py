"""Ropes as products, which TPUs run, give to the last bit what slices give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.steps import inference_step
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops import trigonometry
from ttpu_jax.ops.rope import rope_angles, rotate
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import Placement, local_placement

POSITIONS = jnp.arange(12, dtype=jnp.int32)[None] * 37
BFLOAT16 = np.dtype(jnp.bfloat16)


def rope(dim: int, layout: str) -> RopeSpec:
    return RopeSpec(type="default", theta=10_000.0, rotary_dim=dim, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("highest", [0.7, 100.0, 131_072.0, 1.6e7])
def test_cos_and_sin_of_a_tpu_are_right_to_2e_7(highest: float) -> None:
    """Compared with float64, at positions (whole radians) and between them, and next to each quarter turn."""
    random = np.random.default_rng(0)
    quarters = np.pi / 2 * random.integers(-highest / 2, highest / 2, 20_000, endpoint=True)
    whole, between = np.round(random.uniform(0, highest, 20_000)), random.uniform(-highest, highest, 50_000)
    angles = np.concatenate([[0.0, highest, -highest], quarters, whole, between]).astype(np.float32)
    cos, sin = jax.jit(trigonometry._cos_and_sin)(angles)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), rtol=0, atol=2e-7)
    assert cos[0] == 1 and sin[0] == 0


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("by_product", [False, True])
def test_values_by_feature_turn_as_those_of_pairs(layout: str, dtype: Any, by_product: bool) -> None:
    spec = replace(rope(12, layout), type="dynamic", factor=2.0, max_position_embeddings=64)
    x = jax.random.normal(jax.random.key(0), (2, 12, 3, 32), dtype)
    positions, lengths = jnp.concatenate([POSITIONS, POSITIONS + 5]), jnp.array([12, 500])
    pairs = rope_angles(spec, positions, lengths)
    features = rope_angles(spec, positions, lengths, by_feature=True)
    assert pairs[0].shape == (2, 12, 6) and features[0].shape == features[1].shape == (2, 12, 12)
    expected, turned = (rotate(x, *each, spec, by_product=by_product) for each in (pairs, features))
    np.testing.assert_array_equal(turned.astype(np.float32), expected.astype(np.float32))


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
    # XLA:CPU leaves out the rounding between Qwen3's norms and what is multiplied by a cosine, though not by a matrix.
    np.testing.assert_allclose(logits(), sliced, rtol=0, atol=0.004 if model_type == "qwen3" else 0)
    apart = model_type in ("olmo2", "hunyuan_v1_dense")
    assert products() - dots == (2 if apart else 1)  # of a layer that is traced once


def test_only_programs_for_tpus_have_products() -> None:
    assert not Runtime(local_placement(None)).rotates_by_product


@pytest.mark.tpu_compile
def test_a_tpu_computes_cos_and_sin_once_for_all_layers() -> None:
    """Three layers of a prompt: quarter turns are counted in one fusion, and XLA's own cosine is in none."""
    config = ModelConfig.from_dict({"model_type": "llama", **SMALL, "num_hidden_layers": 3, "head_dim": 128})
    spec = default_registry().architecture(config).spec
    topology = tpu_topology("v5e:1x1")
    placement = Placement(make_mesh(topology, {"tensor": 1}))
    runtime = Runtime(placement, ropes=different_ropes(spec.layers), dtype=BFLOAT16)
    step = inference_step(spec, runtime, BFLOAT16, batch=1, tokens=64, context=64, stacked=False)
    text = compile_for(topology, step.function, *step.arguments, donate_argnums=step.donated).hlo_text
    assert "cosine(" not in text and "sine(" not in text
    assert text.count("round-nearest-even(") == 6  # of three products, two sums, and what is left
