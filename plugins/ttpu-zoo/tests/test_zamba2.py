"""What configs and checkpoints of Zamba2 hold beside what transformers writes of tiny models."""

from __future__ import annotations

from typing import Any

import pytest

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.errors import ConfigError, MappingError
from ttpu_core.spec import SharedSpec

CONFIG: dict[str, Any] = {
    "model_type": "zamba2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_mamba_heads": 4,
    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "adapter_rank": 8,
}


def described(**changes: Any) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict(CONFIG | changes), [])


def test_zamba2_7b_has_its_parameters_and_two_blocks_in_turn() -> None:
    """7,356,749,648 as transformers counts them."""
    hybrid = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)
    spec = described(
        hidden_size=3584,
        num_hidden_layers=81,
        num_attention_heads=32,
        n_mamba_heads=112,
        mamba_ngroups=2,
        adapter_rank=128,
        layers_block_type=["hybrid" if index in hybrid else "mamba" for index in range(81)],
    ).spec
    assert spec.num_parameters == 7_356_749_648
    shared = [layer.block.shared for layer in spec.layers if layer.block.shared is not None]
    assert shared == [SharedSpec(use % 2, None, 128) for use in range(13)]
    assert max(group.repeats for group in spec.groups()) > 5  # what stacked layers save
    attention: Any = spec.layers[6].mixer
    assert (attention.head_dim, attention.scale) == (224, 112**-0.5)


def test_a_long_context_has_its_length_whatever_the_config_names() -> None:
    assert described(use_long_context=True).spec.max_position_embeddings == 16_384
    assert described().spec.max_position_embeddings == 4096


def test_what_a_checkpoint_repeats_of_a_block_is_not_read() -> None:
    mapping = described().mapping
    stored = {name: shape for name, shape in mapping.tensors.items() if "layers.0.shared_transformer" in name}
    assert {name.split("adapter_list.")[1][0] for name in stored if "adapter_list." in name} == {"0", "2"}  # of layer 3
    repeated = {name.replace("layers.0.", "layers.3."): shape for name, shape in stored.items()}
    assert repeated.keys().isdisjoint(mapping.resolve({**mapping.tensors, **repeated}).values())
    other = {name.replace("layers.0.", "layers.1."): shape for name, shape in stored.items()}
    with pytest.raises(MappingError, match=r"layers\.1\.shared_transformer"):
        mapping.resolve({**mapping.tensors, **other})


def test_what_transformers_would_not_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives each of the 3 hybrid layers a block of its own"):
        described(tie_word_embeddings=False)
    apart = described(tie_word_embeddings=False, num_mem_blocks=3).spec
    assert [layer.block.shared.block for layer in apart.layers if layer.block.shared] == [0, 1, 2]


def test_updates_of_keys_have_the_size_of_those_of_queries() -> None:
    described(use_shared_attention_adapter=True)
    with pytest.raises(ConfigError, match="for 4 query and 2 key/value heads, but these updates have one size: set"):
        described(use_shared_attention_adapter=True, num_key_value_heads=2)
