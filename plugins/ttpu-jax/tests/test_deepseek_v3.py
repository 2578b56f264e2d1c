"""DeepSeek-V3, described in `deepseek_v3.py` by what the core has, is the model of transformers."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_core.registry import Registry

pytest.importorskip("torch")
pytest.importorskip("ttpu_conformance")
from ttpu_conformance.declaration import Declaration, Variant
from ttpu_conformance.pytest_door import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

BASE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}
SIMPLE = {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "attention_bias": True}
CHECKS = (
    "config_keys_are_read",
    "float32_logits",
    "bfloat16_logits",
    "padding_invariance",
    "cached_decode",
    "chunked_prefill",
    "greedy_tokens",
    "checkpoint_round_trip",
    "gradients",
    "stacked_layers",
    "sharded_fsdp",
    "sharded_tensor",
)


@parametrize_with_checks(
    "deepseek_v3",
    only=CHECKS,
    registry=Registry([EntryPoint("deepseek_v3", "deepseek_v3", ARCHITECTURES)]),
    declaration=Declaration("deepseek_v3", base=BASE, variants=(Variant("base"), Variant("simple", SIMPLE))),
)
def test_deepseek_v3_keeps_the_promises_of_a_published_plugin(case: Any, check: Any) -> None:
    check(case)
