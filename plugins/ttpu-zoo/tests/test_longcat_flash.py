"""What configs and checkpoints of LongCat-Flash hold that transformers 5.23 neither writes nor loads."""

from __future__ import annotations

from typing import Any

import pytest

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.config.key_audit import keys_ignored
from ttpu_core.errors import ConfigError, MappingError
from ttpu_core.spec import MoESpec

CONFIG: dict[str, Any] = {
    "model_type": "longcat_flash",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_layers": 3,
    "n_routed_experts": 2,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
}


def described(**changes: Any) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict(CONFIG | changes), [])


def test_every_key_of_published_configs_is_known() -> None:
    config = ModelConfig.from_dict(CONFIG | {"router_bias": False})
    default_registry().architecture(config, [])
    assert keys_ignored(config) == ()


def test_a_checkpoint_holds_no_kernels_of_experts_that_return_their_input() -> None:
    mapping = described().mapping
    tensors = mapping.tensors
    assert {name.split(".")[5] for name in tensors if ".experts." in name} == {"0", "1"}
    mapping.resolve(tensors)
    unused = {f"model.layers.0.mlp.experts.{expert}.gate_proj.weight": (2048, 64) for expert in (2, 3)}
    assert unused.keys().isdisjoint(mapping.resolve({**tensors, **unused}))  # which transformers writes
    with pytest.raises(MappingError, match=r"experts\.4\.gate_proj"):
        mapping.resolve({**tensors, "model.layers.0.mlp.experts.4.gate_proj.weight": (2048, 64)})


def test_layers_are_counted_by_either_key_and_experts_lie_in_every_other() -> None:
    counted = described(num_layers=None, num_hidden_layers=6).spec
    assert counted == described().spec == described(num_hidden_layers=3).spec
    assert [isinstance(layer.mlp, MoESpec) for layer in counted.layers] == [True, False] * 3
    (group,) = counted.groups()
    assert (len(group.unit), group.repeats) == (2, 3)
    assert described(num_layers=None).spec.num_layers == 56


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_scale_q_lora", False),
        ("mla_scale_kv_lora", False),
        ("zero_expert_type", "drop"),
        ("attention_method", "GQA"),
    ],
)
def test_what_other_code_computes_otherwise_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"has {value!r} as '{key}', but only .* is known"):
        described(**{key: value})
