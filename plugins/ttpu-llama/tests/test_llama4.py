"""What is special in llama 4's configs: which layers have rope, chunks and experts, and what goes with each."""

from __future__ import annotations

from typing import Any

import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import ConfigError
from ttpu_core.spec import AttentionSpec, MLPSpec, MoESpec, QueryTemperature

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def layers(**keys: Any) -> list[tuple[AttentionSpec, Any]]:
    config = ModelConfig.from_dict({"model_type": "llama4_text", **SIZES, **keys})
    spec = default_registry().architecture(config, []).spec
    return [(layer.mixer, layer.mlp) for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def has_rope(attention: AttentionSpec) -> bool:
    return attention.rope is not None and attention.rope.type != "none"


@pytest.mark.parametrize("listed", [{}, {"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]}])
def test_every_fourth_layer_has_no_rope_and_sees_everything(listed: dict[str, Any]) -> None:
    attentions = [attention for attention, _ in layers(**listed)]
    assert [has_rope(attention) for attention in attentions] == [True, True, True, False]
    assert [attention.chunk for attention in attentions] == [8192, 8192, 8192, None]


def test_queries_are_normalised_where_there_is_rope_and_grow_where_there_is_none() -> None:
    with_rope, without = layers(num_hidden_layers=2, no_rope_layers=[1, 0])
    assert with_rope[0].q_norm is not None and not with_rope[0].q_norm.scale and with_rope[0].qk_norm_after_rope
    assert with_rope[0].query_temperature is None
    # arXiv 2501.19399, as transformers has it: 1 + 0.1 * log(1 + floor((position + 1) / 8192))
    assert without[0].query_temperature == QueryTemperature(0.1, 8192.0, offset=1.0, shift=1.0)
    assert without[0].q_norm is None and without[0].k_norm is None


def test_experts_are_in_every_layer_or_in_every_second_or_where_a_list_says() -> None:
    for keys, expected in (
        ({}, [True] * 4),
        ({"interleave_moe_layer_step": 2}, [False, True, False, True]),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}, [True, False, False, True]),
    ):
        mlps = [mlp for _, mlp in layers(**keys)]
        assert [isinstance(mlp, MoESpec) for mlp in mlps] == expected
        assert {mlp.intermediate_size for mlp in mlps if isinstance(mlp, MLPSpec)} <= {80}
        assert {mlp.intermediate_size for mlp in mlps if isinstance(mlp, MoESpec)} == {48}


def test_too_short_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 entries in 'no_rope_layers' for 4 layers"):
        layers(no_rope_layers=[1, 0])
