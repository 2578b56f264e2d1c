"""What is special in the configs and checkpoints of the mistral models: what an absent key means, which layers have a
window, how experts are stored, and which text part a multimodal parent has."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError
from ttpu_core.spec import AttentionSpec, MixerSpec, MoESpec, QueryTemperature

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def describe(model_type: str, **keys: Any) -> Architecture:
    config = ModelConfig.from_dict({"model_type": model_type, **SIZES, **keys})
    architecture = default_registry().architecture(config, [])
    assert refuse_ignored(config) == ()
    return architecture


def attentions(architecture: Architecture) -> list[AttentionSpec]:
    return [layer.mixer for layer in architecture.spec.layers if isinstance(layer.mixer, AttentionSpec)]


def test_a_window_that_is_not_written_is_4096_and_one_that_is_null_is_none() -> None:
    assert [attention.window for attention in attentions(describe("mistral"))] == [4096, 4096]
    assert [attention.window for attention in attentions(describe("mistral", sliding_window=None))] == [None, None]


@pytest.mark.parametrize("model_type", ["mistral", "ministral"])
def test_layer_types_say_which_layers_have_the_window_in_files_of_either_type(model_type: str) -> None:
    types = ["full_attention", "sliding_attention"]
    layers = attentions(describe(model_type, sliding_window=7, layer_types=types))
    assert [attention.window for attention in layers] == [None, 7]


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"], "1 entries in 'layer_types' for 2 layers"),
        (["full_attention", "chunked_attention"], "'chunked_attention' for layer 1 in 'layer_types', but"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(types: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe("ministral", layer_types=types)


def test_an_absent_number_of_key_value_heads_is_eight_and_null_is_the_number_of_heads() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}

    def kv_heads(**keys: Any) -> int:
        config = ModelConfig.from_dict({"model_type": "mistral", **sizes, "num_attention_heads": 16, **keys})
        return attentions(default_registry().architecture(config, []))[0].num_kv_heads

    assert (kv_heads(), kv_heads(num_key_value_heads=None)) == (8, 16)


def test_ministral3_without_rope_parameters_has_those_of_its_class() -> None:
    attention = attentions(describe("ministral3"))[0]
    assert attention.rope is not None and (attention.rope.type, attention.rope.factor) == ("yarn", 16.0)
    assert attention.query_temperature == QueryTemperature(scale=0.1, period=16_384.0)
    assert attention.head_dim == 128


def test_ministral3_reads_its_temperature_from_old_rope_json_too() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2}
    attention = attentions(describe("ministral3", rope_theta=500.0, rope_scaling=scaling))[0]
    assert attention.query_temperature == QueryTemperature(scale=0.2, period=64.0)
    assert attention.rope is not None and attention.rope.theta == 500.0


def test_the_base_of_mixtrals_rope_is_a_million_where_it_is_absent() -> None:
    rope = attentions(describe("mixtral"))[0].rope
    assert rope is not None and rope.theta == 1_000_000.0


def test_mistral4_reads_experts_that_are_stacked_and_experts_that_are_apart() -> None:
    architecture = describe("mistral4", **LATENT)
    prefix = "model.layers.0.mlp.experts."
    stacked = {f"{prefix}gate_up_proj": (4, 16, 32), f"{prefix}down_proj": (4, 32, 8)}
    mapping, path = architecture.mapping, "layers.0.moe.experts.gate_up.kernel"
    assert {name: shape for name, shape in mapping.tensors.items() if name.startswith(prefix)} == stacked
    apart = mapping.suited_to([f"{prefix}0.gate_proj.weight"])
    names = [leaf.name for leaf in apart[path].leaves()]
    assert names[:2] == [f"{prefix}0.gate_proj.weight", f"{prefix}0.up_proj.weight"] and len(names) == 8


def test_mistral4_rotates_the_features_that_its_sizes_say_or_is_refused() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    for factor in ({}, {"partial_rotary_factor": 1 / 3}):
        mixer = describe("mistral4", **LATENT, rope_parameters=rope | factor).spec.layers[0].mixer
        assert isinstance(mixer, MixerSpec) and mixer.rope is not None and mixer.rope.rotary_dim == 4
    with pytest.raises(ConfigError, match="4 rotated features per head, but its rope rotates 6"):
        describe("mistral4", **LATENT, rope_parameters=rope | {"partial_rotary_factor": 0.5})


def parent(**keys: Any) -> Architecture:
    config = ModelConfig.from_dict({"model_type": "mistral3", "vision_config": {"hidden_size": 8}, **keys})
    return default_registry().architecture(config, [])


def test_a_parent_without_a_text_part_is_mistral_small() -> None:
    spec = parent().spec
    # Mistral Small 3.1: 40 layers of 5120 features, a vocabulary of 131,072, 23.6 billion parameters.
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (40, 5120, 131_072)
    assert round(spec.num_parameters / 1e9, 1) == 23.6
    assert {mixer.window for layer in spec.layers if isinstance(mixer := layer.mixer, AttentionSpec)} == {None}


def test_the_text_part_decides_what_its_layers_are() -> None:
    spec = parent(text_config={"model_type": "mistral4", **SIZES, **LATENT, "first_k_dense_replace": 1}).spec
    assert spec.model_type == "mistral3" and all(isinstance(layer.mixer, MixerSpec) for layer in spec.layers)
    assert [isinstance(layer.mlp, MoESpec) for layer in spec.layers] == [False, True]


def test_a_text_part_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="'llama', but the known types are mistral, ministral, ministral3, mistral4"):
        parent(text_config={"model_type": "llama"})


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [
        ({}, {}, False),  # as published: transformers 4 looked at the text part
        ({}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),  # transformers 5 writes both
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
    ],
)
def test_the_parent_says_whether_the_head_is_tied_and_where_it_is_silent_the_text_part(
    whole: dict[str, bool], part: dict[str, bool], tied: bool
) -> None:
    assert parent(text_config=SIZES | part, **whole).spec.head.tied == tied


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_is_found_behind_either_prefix_and_images_are_left_out(prefix: str) -> None:
    mapping = parent(text_config=SIZES).mapping
    tensors = {name.replace("language_model.model.", prefix, 1): shape for name, shape in mapping.tensors.items()}
    if prefix == "model.language_model.":
        tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")
    images = {"vision_tower.ln_pre.weight": (8,), "multi_modal_projector.norm.weight": (8,)}
    assert mapping.resolve(tensors | images).keys() == mapping.tensors.keys()


def test_the_text_part_is_saved_under_the_names_that_transformers_writes() -> None:
    tensors = parent(text_config=SIZES | {"model_type": "mistral"}).mapping.tensors
    assert {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"} <= tensors.keys()
    assert all(name.startswith("language_model.") for name in tensors)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mistral-7b-v0.3", 7_248_023_552),
        ("ministral-8b", 8_019_808_256),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_the_published_configs_describe_models_of_the_published_sizes(name: str, parameters: int) -> None:
    config = ModelConfig.from_file(str(files("ttpu_mistral") / "configs" / f"{name}.json"))
    architecture = default_registry().architecture(config, [])
    assert architecture.spec.num_parameters == parameters and refuse_ignored(config) == ()
