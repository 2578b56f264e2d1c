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
