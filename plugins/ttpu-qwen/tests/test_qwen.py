"""What is special about Qwen configs and checkpoints, beyond what the conformance kit checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ttpu_qwen
from ttpu_core import ModelConfig, default_registry
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import gather
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerSpec, MLPSpec, MoESpec

CONFIGS = sorted((Path(ttpu_qwen.__file__).parent / "configs").glob("*.json"))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
          "head_dim": 8}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 5}


def architecture(model_type: str, **keys: Any) -> Any:
    return default_registry().architecture(ModelConfig.from_dict({"model_type": model_type, **SIZES, **keys}))


def spec(model_type: str, **keys: Any) -> ArchitectureSpec:
    described: ArchitectureSpec = architecture(model_type, **keys).spec
    return described


def windows(model_type: str, **keys: Any) -> list[int | None]:
    return [attention(layer).window for layer in spec(model_type, **keys).layers]


def attention(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.mixer, AttentionSpec)
    return layer.mixer


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_published_configs_have_no_key_that_is_ignored_except_the_vision_part(file: Path) -> None:
    config = ModelConfig.from_file(file)
    default_registry().architecture(config)
    assert all("vision_config" in sentence for sentence in refuse_ignored(config))


# From the model cards; those of Qwen3-Next and Qwen3.5 round, and count neither vision nor prediction heads here.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-next-80b-a3b", 79.7e9),
        ("qwen3.5-9b", 8.95e9),
        ("qwen3.5-35b-a3b", 34.7e9),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name: str, parameters: float) -> None:
    file = next(file for file in CONFIGS if file.stem == name)
    found = default_registry().architecture(ModelConfig.from_file(file)).spec.num_parameters
    assert found == pytest.approx(parameters, rel=0 if isinstance(parameters, int) else 2e-3)


def test_qwen2_has_biases_on_queries_keys_and_values_whatever_the_config_says() -> None:
    for said in (True, False):
        layer = attention(spec("qwen2", attention_bias=said).layers[0])
        assert (layer.qkv_bias, layer.output_bias) == (True, False)


def test_windows_are_those_of_the_upper_layers_of_every_other_layer_or_of_all() -> None:
    used = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("qwen2", **used, max_window_layers=3) == [None, None, None, 64]
    assert windows("qwen3", **used, max_window_layers=1) == [None, 64, 64, 64]
    assert windows("qwen2_moe", **used, **EXPERTS, max_window_layers=3) == [64, None, 64, None]
    assert windows("qwen3_moe", **used, **EXPERTS) == [64] * 4
    for model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        assert windows(model_type, sliding_window=64, max_window_layers=0) == [None] * 4


def test_layer_types_win_over_max_window_layers() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    used = {"use_sliding_window": True, "sliding_window": 64, "layer_types": types}
    assert windows("qwen3", **used, max_window_layers=0) == [64, None, 64, None]


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 4}, "each token 4 of 3 experts"),
        ("qwen3_next", {**LINEAR, **EXPERTS, "linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("qwen3_next", {**LINEAR, **EXPERTS, "layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3_5_text", {**LINEAR, "attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {**LINEAR, "output_gate_type": "sigmoid"}, "output_gate_type"),
        ("qwen3_5_moe_text", {**LINEAR, **EXPERTS, "mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_values_that_no_model_of_the_type_has_are_refused_by_name(
    model_type: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        spec(model_type, **keys)


def test_layers_are_sparse_by_step_except_where_they_are_listed_as_dense() -> None:
    layers = spec("qwen3_moe", **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]).layers
    assert [type(layer.mlp) for layer in layers] == [MLPSpec, MoESpec, MLPSpec, MLPSpec]
    assert all(isinstance(layer.mlp, MLPSpec) for layer in spec("qwen3_moe", **EXPERTS | {"num_experts": 0}).layers)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_every_fourth_layer_or_whatever_the_interval_says_has_attention(model_type: str) -> None:
    for keys, places in (({}, [3]), ({"full_attention_interval": 2}, [1, 3])):
        layers = spec(model_type, **LINEAR, **EXPERTS, **keys).layers
        assert [index for index, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec)] == places


def test_the_class_s_defaults_are_filled_in() -> None:
    found = spec("qwen3_next", **{key: SIZES[key] for key in SIZES if key != "num_key_value_heads"})
    last = attention(found.layers[3])
    assert (last.num_kv_heads, last.head_dim, last.rope and last.rope.rotary_dim) == (2, 256, 64)
    mlp = found.layers[0].mlp
    assert isinstance(mlp, MoESpec)
    assert (mlp.num_experts, mlp.experts_per_token, mlp.router.renormalize) == (512, 10, True)


@pytest.mark.parametrize("tied", [True, False, None])
def test_the_parent_says_whether_the_head_is_tied(tied: bool | None) -> None:
    text = {"model_type": "qwen3_5_text", **SIZES, **LINEAR, "tie_word_embeddings": not tied}
    parent = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": tied}
    found = default_registry().architecture(ModelConfig.from_dict(parent))
    assert found.spec.head.tied is bool(tied)
    assert found.spec.model_type == "qwen3_5"


def test_checkpoints_of_the_text_part_and_of_the_whole_are_read_alike() -> None:
    text = {**SIZES, **LINEAR}
    alone = architecture("qwen3_5_text", **text)
    whole = default_registry().architecture(ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text}))
    extras = {"model.visual.patch_embed.proj.weight": (3, 3), "mtp.fc.weight": (4, 4)}
    for held in (alone, whole):
        for reader in (alone, whole):
            reader.mapping.resolve(held.mapping.tensors | extras)


def test_experts_are_read_one_by_one_and_as_published_in_one_tensor() -> None:
    """Qwen3.5 is published with the experts of a layer in two tensors; transformers saves one per expert and part."""
    described = architecture("qwen3_5_moe_text", **LINEAR, **EXPERTS)
    rng = np.random.default_rng(0)
    one_by_one = {name: rng.normal(size=shape) for name, shape in described.mapping.tensors.items()}
    stacked = {name: tensor for name, tensor in one_by_one.items() if ".experts." not in name}
    for layer in range(4):
        mlp = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([one_by_one[f"{mlp}.{expert}.{part}_proj.weight"] for expert in range(3)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{mlp}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked[f"{mlp}.down_proj"] = parts["down"]
    for path, parameter in described.spec.parameters.items():
        values = []
        for tensors in (one_by_one, stacked):
            mapping = described.mapping.suited_to(tensors)
            mapping.resolve({name: tensor.shape for name, tensor in tensors.items()})
            value = np.empty(parameter.shape)
            gather(mapping[path], tensors.__getitem__, value)
            values.append(value)
        np.testing.assert_array_equal(values[0], values[1])
