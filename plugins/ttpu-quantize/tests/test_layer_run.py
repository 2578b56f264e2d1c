"""A model run layer by layer computes what it computes as a whole, observes the inputs of its products, and is left
unchanged by every fold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG

from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.spec.parameters import LAYERS
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.layer_run import LayerRun
from ttpu_quantize.folding import apply, folds, symmetric

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**CONFIG, **SMALL, "attention_bias": True},
    "qwen2_moe": {
        **SMALL,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 1,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma2": {
        **SMALL,
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 4,
        "sliding_window": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

SHORTCUT: dict[str, Any] = {
    **SMALL,
    "model_type": "longcat_flash",
    "num_layers": 1,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 24,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 12,
    "max_position_embeddings": 64,
}
"""Experts on a shortcut, of which some return their input."""


class Case:
    """A model with random weights, and its layers over some tokens."""

    def __init__(self, name: str) -> None:
        self.random = np.random.default_rng(0)
        self.architecture: Architecture = default_registry().architecture(
            ModelConfig.from_dict((MODELS | {"longcat_flash": SHORTCUT})[name])
        )
        self.spec = self.architecture.spec
        self.params = {
            path: (self.random.standard_normal(parameter.shape) * 0.3).astype(np.float32) + (parameter.init == "ones")
            for path, parameter in self.spec.parameters.items()
        }
        self.tokens = self.random.integers(0, 64, (8, 12)).astype(np.int32)

    def run(self, mesh: str | None = None) -> LayerRun:
        backend = default_registry().backend("jax")
        options = JaxLoadOptions(parallelism_strategy=mesh)
        run = backend.layer_run(self.architecture, self.params, self.tokens, options, "float32")
        assert isinstance(run, LayerRun)
        return run

    def layer(self, number: int) -> dict[str, np.ndarray]:
        prefix = f"{LAYERS}{number}."
        return {path.removeprefix(prefix): each for path, each in self.params.items() if path.startswith(prefix)}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_layers_one_by_one_return_what_the_model_computes(case: Case) -> None:
    run = case.run()
    for number in range(len(case.spec.layers)):
        run.advance(number, case.layer(number))
    whole = causal_model(case.spec, run.runtime)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), case.tokens.shape)
    arrays = {path: jnp.asarray(array) for path, array in case.params.items()}
    expected = whole.hidden(arrays, jnp.asarray(case.tokens), jnp.asarray(positions))
    norm = whole.module(arrays).final_norm
    found = np.concatenate([np.asarray(norm(stream)) for stream in run.streams])
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


def test_statistics_are_those_of_the_inputs(case: Case) -> None:
    run = case.run()
    layer = case.layer(0)
    kernels = [path for path in layer if path.endswith(".kernel")]
    found = run.observe(0, layer, kernels)
    first = "attention.qkv.kernel"
    stream = np.concatenate([np.asarray(each) for each in run.streams]).reshape(-1, 16)
    norm = case.spec.layers[0].norm
    normed = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + norm.eps)
    inputs = normed * (layer["input_norm.scale"] + norm.offset)
    np.testing.assert_allclose(found[first].products, inputs.T @ inputs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found[first].magnitude, np.abs(inputs).sum(0), rtol=1e-3)
    np.testing.assert_allclose(found[first].largest, np.abs(inputs).max(0), rtol=1e-3)
    assert int(found[first].tokens) == case.tokens.size
    if "moe.router.kernel" in kernels:  # each token goes to two experts, so they see twice what the router sees
        experts, router = found["moe.experts.gate_up.kernel"], found["moe.router.kernel"]
        assert experts.tokens.sum() == 2 * case.tokens.size
        np.testing.assert_allclose(experts.products.sum(0), 2 * router.products, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(experts.magnitude.sum(0), 2 * router.magnitude, rtol=1e-3)
        np.testing.assert_allclose(experts.largest.max(0), router.largest, rtol=1e-4)
        assert found["moe.experts.down.kernel"].products.shape == (4, 12, 12)


def test_folds_leave_a_layer_as_it_was(case: Case) -> None:
    plain, folded = case.run(), case.run()
    layer, changed = case.layer(0), case.layer(0)
    kinds = []
    for fold in folds(case.spec.layers[0], changed, is_source=False):
        consumer = changed[fold.consumers[0]]
        shape = (len(consumer), consumer.shape[-1]) if "experts.down" in fold.consumers[0] else consumer.shape[-1:]
        scales = symmetric(fold, np.exp(case.random.standard_normal(shape)).astype(np.float32))
        apply(fold, scales, changed, "bfloat16" if fold.kind == "norm" else "float32")
        kinds.append(fold.kind)
    assert kinds[:3] == ["norm", "norm", "value"]
    assert set(kinds[3:]) == {"up"}
    plain.advance(0, layer)
    folded.advance(0, changed)
    for one, other in zip(plain.streams, folded.streams, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", ["longcat_flash"], indirect=True)
def test_experts_on_a_shortcut_are_run_and_observed_with_their_layer(case: Case) -> None:
    test_layers_one_by_one_return_what_the_model_computes(case)
    run, layer = case.run(), case.layer(0)
    kernels = [path for path in layer if path.endswith(".kernel")]
    found = run.observe(0, layer, kernels)
    assert set(found) == set(kernels)
    assert found["moe.experts.down.kernel"].tokens.sum() < 2 * case.tokens.size  # the others return their input
    run.advance(0, layer)
    later = case.layer(1)
    assert set(run.observe(1, later, ["mlp.down.kernel"])) == {"mlp.down.kernel"}
    whole = causal_model(case.spec, run.runtime).module({path: jnp.asarray(each) for path, each in case.params.items()})
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), case.tokens.shape)
    states = whole.hidden_states(jnp.asarray(case.tokens), jnp.asarray(positions))
    assert len(states) == 2  # both layers are one in transformers


@pytest.mark.parametrize("case", ["longcat_flash"], indirect=True)
def test_no_scale_is_folded_into_what_an_expert_returns_unchanged(case: Case) -> None:
    first, second = (
        {fold.producer for fold in folds(layer, case.layer(number), is_source=False)}
        for number, layer in enumerate(case.spec.layers)
    )
    assert "mlp_norm" not in first and "mlp_norm" in second and "moe.experts.gate_up" in first


@pytest.mark.parametrize(("case", "axis"), [("llama", "tensor"), ("qwen2_moe", "expert")], indirect=["case"])
def test_statistics_are_the_same_on_a_mesh(case: Case, axis: str) -> None:
    mesh = f"data={jax.device_count() // 2},{axis}=2"
    layer = case.layer(0)
    kernels = [path for path in layer if path.endswith(".kernel")]
    whole, sharded = case.run(), case.run(mesh)
    expected, found = whole.observe(0, layer, kernels), sharded.observe(0, layer, kernels)
    for path in kernels:
        for name in ("tokens", "products", "magnitude"):
            one, other = getattr(found[path], name), getattr(expected[path], name)
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3, err_msg=f"{path} {name}")
        if ".experts." not in path:
            np.testing.assert_allclose(found[path].largest, expected[path].largest, rtol=1e-4)
    whole.advance(0, layer)
    sharded.advance(0, layer)
    one, other = (np.concatenate([np.asarray(stream) for stream in run.streams]) for run in (whole, sharded))
    np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_a_mesh_that_shards_each_expert_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the statistics of an expert need all of its inputs"):
        Case("qwen2_moe").run(f"data={jax.device_count() // 2},tensor=2")
