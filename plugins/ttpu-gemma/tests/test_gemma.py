"""What is special about gemma configs and checkpoints: class defaults that published files rely on, older keys, names
of multimodal checkpoints, and values that are refused."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.architecture import Architecture
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError, TTPUError, UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec

FULL, SLIDING = "full_attention", "sliding_attention"

# Elements over all tensors of these checkpoints; of multimodal ones, over those of the text model.
PUBLISHED = {
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "vaultgemma-1b": 1_038_741_120,
    "gemma-3-12b-text": 11_766_034_176,
    "gemma-3-4b-it": 3_880_263_168,
}

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SMALL3N = SMALL | {
    "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
}
SMALL4 = SMALL3N | {"global_head_dim": 16}
SMALL3N = SMALL3N | {"laurel_rank": 4}
TEXT = {"gemma3": SMALL, "gemma3n": SMALL3N, "gemma4": SMALL4}


def described(model_type: str, **keys: Any) -> Architecture:
    config = ModelConfig.from_dict({"model_type": model_type, **keys})
    architecture = default_registry().architecture(config, [])
    assert refuse_ignored(config) == ()
    return architecture


def spec_of(model_type: str, **keys: Any) -> ArchitectureSpec:
    return described(model_type, **keys).spec


def attention(spec: ArchitectureSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_their_checkpoints(name: str) -> None:
    config = ModelConfig.from_dict(ModelConfig.from_file(str(files("ttpu_gemma") / f"configs/{name}.json")).to_dict())
    assert default_registry().architecture(config, []).spec.num_parameters == PUBLISHED[name]
    assert refuse_ignored(config) == ()


def test_a_text_config_of_a_few_keys_is_filled_in_by_its_class() -> None:
    layers = attention(spec_of("gemma3", text_config={"model_type": "gemma3_text", "num_hidden_layers": 6}))
    assert (layers[0].num_heads, layers[0].num_kv_heads, layers[0].head_dim) == (8, 4, 256)
    assert [layer.window for layer in layers] == [4096] * 5 + [None]


def test_older_and_newer_rope_keys_describe_the_same_gemma3() -> None:
    older = spec_of(
        "gemma3_text",
        **SMALL,
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    newer = spec_of(
        "gemma3_text",
        **SMALL,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            SLIDING: {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert older == newer
    thetas = [layer.rope.theta for layer in attention(older) if layer.rope]
    assert thetas == [2e4, 5e5, 2e4, 5e5]


def test_rope_keys_are_gemmas_own_where_a_gemma3_config_has_none() -> None:
    layers = attention(spec_of("gemma3_text", **SMALL, sliding_window_pattern=2))
    assert [layer.rope.theta for layer in layers if layer.rope] == [1e4, 1e6, 1e4, 1e6]


def test_the_first_gemma_files_say_gelu_and_mean_its_approximation() -> None:
    spec = spec_of("gemma", **SMALL, hidden_act="gelu", hidden_activation=None)
    assert {layer.mlp.activation.name for layer in spec.layers if layer.mlp} == {"gelu_tanh"}


def test_keys_and_values_are_shared_with_the_last_layer_of_the_same_type() -> None:
    shared = [layer.kv_from_layer for layer in attention(spec_of("gemma3n_text", **SMALL3N))]
    assert shared == [None, None, 0, 1]


def test_gemma4_heads_by_layer_and_by_type_describe_the_same_model() -> None:
    keys = {key: value for key, value in SMALL4.items() if key != "global_head_dim"}
    by_type = spec_of(
        "gemma4_text", **keys, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True
    )
    own = {"head_dim": 16, "num_key_value_heads": 1}
    by_layer = spec_of("gemma4_text", **keys, attention_k_eq_v=True, per_layer_config={"01": own, "03": own})
    assert by_type == by_layer
    assert [(a.head_dim, a.num_kv_heads, a.value_is_key) for a in attention(by_type)] == [
        (8, 2, False),
        (16, 1, True),
    ] * 2


def test_gemma4_ignores_the_number_of_global_heads_where_values_are_not_keys() -> None:
    spec = spec_of("gemma4_text", **SMALL4, num_global_key_value_heads=1)
    assert [layer.num_kv_heads for layer in attention(spec)] == [2] * 4


def test_the_last_gemma4_layer_sees_everything_whatever_the_file_says() -> None:
    kinds = {"layer_types": [SLIDING, FULL, FULL, SLIDING], "num_kv_shared_layers": 0}
    assert [a.window for a in attention(spec_of("gemma4_text", **SMALL4 | kinds))] == [512, None, None, None]


def test_gemma4_mlps_are_twice_as_wide_where_keys_are_shared() -> None:
    spec = spec_of("gemma4_text", **SMALL4, use_double_wide_mlp=True)
    assert [layer.mlp.intermediate_size for layer in spec.layers if isinstance(layer.mlp, MLPSpec)] == [24, 24, 48, 48]


def test_gemma4_keeps_the_dense_mlp_beside_the_experts() -> None:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 12}
    mlp = spec_of("gemma4_text", **SMALL4, **experts).layers[0].mlp
    assert isinstance(mlp, MoESpec)
    assert mlp.dense == MLPSpec(24, mlp.activation)


@pytest.mark.parametrize("parent", TEXT)
def test_the_text_part_is_the_text_model(parent: str) -> None:
    whole = spec_of(parent, text_config=TEXT[parent], vision_config={"hidden_size": 3}, audio_config=None)
    alone = spec_of(f"{parent}_text", **TEXT[parent])
    assert (whole.embedding, whole.layers, whole.head) == (alone.embedding, alone.layers, alone.head)


@pytest.mark.parametrize("base", ["model.", "model.language_model.", "language_model.model.", ""])
@pytest.mark.parametrize("parent", TEXT)
def test_text_tensors_are_found_wherever_a_multimodal_checkpoint_has_them(parent: str, base: str) -> None:
    mapping = described(parent, text_config=TEXT[parent]).mapping
    prefix = "language_model.model." if parent == "gemma3" else "model.language_model."
    assert all(name.startswith(prefix) for name in mapping.tensors)
    held = {base + name.removeprefix(prefix): shape for name, shape in mapping.tensors.items()}
    others = {"model.vision_tower.patch.weight": (3, 3), "multi_modal_projector.norm.weight": (3,)}
    assert mapping.resolve(held | others) == {prefix + name.removeprefix(base): name for name in held}


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
@pytest.mark.parametrize("parent", TEXT)
def test_an_untied_head_is_found_inside_and_outside_the_text_part(parent: str, head: str) -> None:
    mapping = described(parent, text_config=TEXT[parent], tie_word_embeddings=False).mapping
    (leaf,) = mapping["head.kernel"].leaves()
    held = {(head if name == leaf.name else name): shape for name, shape in mapping.tensors.items()}
    assert mapping.resolve(held)[leaf.name] == head


def test_keys_that_a_checkpoint_holds_for_layers_that_share_them_are_left_out() -> None:
    mapping = described("gemma3n_text", **SMALL3N).mapping
    for layer in (2, 3):
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            mapping.resolve(mapping.tensors | {f"model.layers.{layer}.self_attn.{part}.weight": (3,)})
    with pytest.raises(TTPUError, match="no rule accounts for"):
        mapping.resolve(mapping.tensors | {"model.layers.0.self_attn.v_norm.weight": (3,)})


@pytest.mark.parametrize(
    ("model_type", "value"),
    [("gemma", True), ("gemma2", True), ("vaultgemma", True), ("gemma3_text", True), ("gemma4_text", "all")],
)
def test_tokens_that_see_later_ones_are_refused(model_type: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match="tokens see later ones"):
        described(model_type, **SMALL, use_bidirectional_attention=value)


def test_gemma4_pictures_that_see_all_of_themselves_are_no_matter_for_text() -> None:
    assert spec_of("gemma4_text", **SMALL4, use_bidirectional_attention="vision") == spec_of("gemma4_text", **SMALL4)


@pytest.mark.parametrize(
    ("model_type", "keys", "sentence"),
    [
        ("gemma2", {"layer_types": [FULL]}, "has 1 entries in 'layer_types' for 4 layers"),
        ("gemma2", {"layer_types": [FULL, FULL, FULL, "chunked"]}, "'sliding_attention' or 'full_attention'"),
        ("gemma3n_text", {"num_kv_shared_layers": 3}, "no earlier layer has the type 'full_attention' of layer 1"),
        ("gemma3n_text", {"num_kv_shared_layers": 4}, "no earlier layer has the type"),
        ("gemma3n_text", {"altup_num_inputs": 1}, "at least 2 streams are needed"),
        ("gemma3n_text", {"altup_active_idx": 4}, "4 AltUp streams and computes stream 4"),
        ("gemma3n_text", {"intermediate_size": [24, 24]}, "2 values as 'intermediate_size' for 4 layers"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "1 values as 'activation_sparsity_pattern'"),
        ("gemma4_text", {"per_layer_config": {"1": {"hidden_size": 8}}}, "gives layer 1 its own 'hidden_size'"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(model_type: str, keys: dict[str, Any], sentence: str) -> None:
    small = SMALL if model_type == "gemma2" else SMALL3N
    with pytest.raises(ConfigError, match=sentence):
        described(model_type, **small | keys)


def test_a_multimodal_config_without_a_text_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="text_config"):
        described("gemma3")
