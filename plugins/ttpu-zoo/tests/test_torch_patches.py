"""The zoo's replacements for functions of transformers compute what they replace."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}])
def test_deepseek_v2_turns_pairs_in_real_numbers_as_in_complex_ones(scaling: dict[str, object] | None) -> None:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as stock

    from ttpu_zoo.torch.deepseek_v2 import apply_rotary, rotary

    config = stock.DeepseekV2Config(rope_scaling=scaling, max_position_embeddings=64, qk_rope_head_dim=8)
    embedding = stock.DeepseekV2RotaryEmbedding(config)
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    positions = torch.stack((torch.arange(5), torch.arange(40, 45)))
    expected = stock.apply_rotary_emb(query, key, embedding(query, positions))
    found = apply_rotary(query, key, rotary(embedding, query, positions))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_longcat_flash_weighs_every_expert_as_transformers_does_those_chosen() -> None:
    from transformers.models.longcat_flash import modeling_longcat_flash as stock

    from ttpu_zoo.torch.longcat_flash import experts

    config = stock.LongcatFlashConfig(
        hidden_size=8, expert_ffn_hidden_size=6, n_routed_experts=4, zero_expert_num=3, moe_topk=3
    )
    module = stock.LongcatFlashExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    hidden, index = torch.randn(5, 8), torch.stack([torch.randperm(7)[:3] for _ in range(5)])
    weights = torch.rand(5, 3)
    torch.testing.assert_close(experts(module, hidden, index, weights), module(hidden, index, weights))
    narrow = experts(module.bfloat16(), hidden.bfloat16(), index, weights)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow, module(hidden.bfloat16(), index, weights), atol=0.1, rtol=0.05)
