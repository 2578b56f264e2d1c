"""Gemma 2: norms before and after each sub-layer, windows on every other layer, capped attention logits and head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, BlockSpec
from ttpu_gemma.common import (
    layer_type,
    refuse_bidirectional,
    ttpu_embedding,
    ttpu_head,
    ttpu_mlp,
    ttpu_norm,
    window,
)

__all__ = ["ttpu_attention", "ttpu_block", "ttpu_config", "ttpu_embedding", "ttpu_head", "ttpu_mlp", "ttpu_norm"]

CONFIG_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PERIOD = 2  # every second layer has full attention


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A gemma2 config with the class's defaults."""
    config.does_not_matter("sliding_window_size", because="old files repeat sliding_window under this name")
    refuse_bidirectional(config)
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_block() -> BlockSpec:
    """Norms before and after the sub-layers."""
    return BlockSpec("sandwich")


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Grouped-query attention with its own scale and capped logits, with a window on sliding layers."""
    return replace(
        defaults.ttpu_attention(config),
        scale=config.positive_number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=config.positive_number("attn_logit_softcapping", default=None),
        window=window(config, layer_type(config, layer, PERIOD)),
    )
