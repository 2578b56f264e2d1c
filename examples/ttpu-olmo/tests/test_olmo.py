"""What is special in OLMo 3's config.json: layer types, and rope parameters in the forms of transformers 4 and 5."""

from typing import Any

import pytest
from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import ConfigError
from ttpu_core.spec import AttentionSpec

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
SIZES: dict[str, Any] = {
    "model_type": "olmo3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 65_536,
}


def attentions(**keys: Any) -> list[AttentionSpec]:
    """The attention of each layer of a config with the sizes above."""
    spec = default_registry().architecture(ModelConfig.from_dict({**SIZES, **keys})).spec
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def test_every_fourth_layer_sees_everything_where_layer_types_are_absent() -> None:
    assert [attention.window for attention in attentions()] == [4096, 4096, 4096, None] * 2


def test_the_base_of_rope_is_500000_where_it_is_absent() -> None:
    assert {attention.rope.theta for attention in attentions() if attention.rope} == {500_000.0}


def test_only_full_attention_follows_the_rope_keys_of_old_files() -> None:
    ropes = [attention.rope for attention in attentions(rope_theta=10_000, rope_scaling=YARN)]
    assert [rope.type for rope in ropes if rope] == ["default", "default", "default", "yarn"] * 2
    assert [rope.theta for rope in ropes if rope] == [500_000.0, 500_000.0, 500_000.0, 10_000.0] * 2


def test_old_and_new_files_describe_the_same_model() -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        "full_attention": {**YARN, "rope_theta": 10_000.0},
    }
    assert attentions(rope_theta=10_000, rope_scaling=YARN) == attentions(rope_parameters=nested)


@pytest.mark.parametrize(
    ("types", "sentence"),
    [
        (["full_attention"] * 7, "7 entries in 'layer_types' for 8 layers"),
        (["full_attention"] * 7 + ["linear_attention"], "'linear_attention' for layer 7 in 'layer_types'"),
    ],
)
def test_a_layer_without_a_known_type_is_refused(types: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        attentions(layer_types=types)
