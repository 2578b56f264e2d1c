"""What published configs of Hunyuan hold that transformers' config classes do not name."""

from __future__ import annotations

import pytest

from ttpu_core import ModelConfig, default_registry

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_heads_are_normed_whatever_the_config_says_as_in_transformers(model_type: str) -> None:
    named = [{}, {"use_qk_norm": True}, {"use_qk_norm": False}]
    found = [
        default_registry().architecture(ModelConfig.from_dict({"model_type": model_type, **SIZES, **one}), []).spec
        for one in named
    ]
    assert found[0] == found[1] == found[2]
