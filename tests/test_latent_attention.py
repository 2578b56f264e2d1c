"""Latent attention in the core's vocabulary: what is stored, what is cached, and DeepSeek's tensor names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ttpu_core.errors import ConfigError
from ttpu_core.mapping import gather
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MixerSpec, MLPSpec, NormSpec
from ttpu_core.spec.latent_attention import latent_attention, yarn_softmax_scale
from ttpu_core.spec.rope import NO_ROPE, RopeSpec

# DeepSeek-V3's own sizes.
SIZES: dict[str, Any] = {
    "hidden_size": 7168,
    "num_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope": RopeSpec(rotary_dim=64),
}


def model(mixer: MixerSpec, hidden: int = 7168) -> ArchitectureSpec:
    layer = LayerSpec(mixer, MLPSpec(8), NormSpec())
    return ArchitectureSpec("test", EmbeddingSpec(16, hidden), (layer,), NormSpec(), HeadSpec(), 64)


def test_a_token_of_deepseek_v3_takes_576_cached_numbers_per_layer() -> None:
    # arXiv 2412.19437, section 2.1.1: d_c = 512 and d_h^R = 64 are all that is cached.
    assert model(latent_attention(**SIZES)).kv_bytes_per_token(1) == 576


def test_attention_of_deepseek_v3_has_187_million_parameters_per_layer() -> None:
    mixer = latent_attention(**SIZES)
    # q_a and its norm, q_b, kv_a_with_mqa and its norm, kv_b, o
    expected = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    assert sum(parameter.size for _, parameter in mixer.parameters) == expected == 187_107_328


def test_the_usual_names_are_those_of_deepseek() -> None:
    tensors = standard_mapping(model(latent_attention(**SIZES))).tensors
    assert {name: shape for name, shape in tensors.items() if "self_attn" in name} == {
        "model.layers.0.self_attn.q_a_proj.weight": (1536, 7168),
        "model.layers.0.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.0.self_attn.q_b_proj.weight": (24_576, 1536),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (512,),
        "model.layers.0.self_attn.kv_b_proj.weight": (32_768, 512),
        "model.layers.0.self_attn.o_proj.weight": (7168, 16_384),
    }


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"bias": True}], ids=["latent", "direct", "biases"])
def test_every_parameter_has_a_rule(changes: dict[str, Any]) -> None:
    spec = model(latent_attention(**(SIZES | changes)))
    standard_mapping(spec).check_parameters(spec.parameters)


def test_each_heads_key_and_value_are_neighbours_in_one_tensor() -> None:
    mixer = latent_attention(
        hidden_size=4,
        num_heads=2,
        kv_lora_rank=1,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=1,
        rope=NO_ROPE,
    )
    mapping = standard_mapping(model(mixer, hidden=4))
    rows = np.arange(8.0).reshape(8, 1)  # head 0: key 0 1 2, value 3; head 1: key 4 5 6, value 7
    key, value = np.empty((2, 3, 1)), np.empty((2, 1, 1))
    gather(mapping["layers.0.mixer.key_up.kernel"], lambda name: rows, key)
    gather(mapping["layers.0.mixer.value_up.kernel"], lambda name: rows, value)
    assert key[..., 0].tolist() == [[0, 1, 2], [4, 5, 6]] and value[..., 0].tolist() == [[3], [7]]


def test_other_names_serve_where_a_checkpoint_has_them() -> None:
    names = CheckpointNames(kv_up="attn.kv_up", kv_down_norm="attn.norm")
    tensors = standard_mapping(model(latent_attention(**SIZES)), names).tensors
    assert {"model.layers.0.attn.kv_up.weight", "model.layers.0.attn.norm.weight"} <= tensors.keys()


def test_a_mixer_of_a_plugins_own_that_has_this_name_keeps_its_own_rules() -> None:
    own = replace(latent_attention(**SIZES), implementations=(("jax", "package.module:Class"),))
    assert not [path for path, _ in standard_mapping(model(own)).rules if "mixer" in path]


def test_a_rope_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="with 64 rotated features per head, but its rope rotates 32"):
        latent_attention(**(SIZES | {"rope": RopeSpec(rotary_dim=32)}))


def test_yarn_sharpens_the_scores_of_deepseek_v3_twice() -> None:
    # DeepSeek-V3's config.json: factor 40, mscale_all_dim 1.0; modeling_deepseek.py multiplies by mscale ** 2.
    mscale = 0.1 * math.log(40) + 1
    rope = RopeSpec(type="yarn", rotary_dim=64, factor=40.0, mscale_all_dim=1.0)
    assert yarn_softmax_scale(rope, 192) == pytest.approx(192**-0.5 * mscale**2)
    assert yarn_softmax_scale(replace(rope, mscale_all_dim=None), 192) == 192**-0.5
    assert yarn_softmax_scale(RopeSpec(rotary_dim=64, mscale_all_dim=1.0), 192) == 192**-0.5
