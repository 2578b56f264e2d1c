"""Qwen3, dense: qwen2 without biases, with a norm on each head of queries and keys, and an explicit `head_dim`."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.spec import AttentionSpec
from ttpu_qwen.layer_types import sliding_window, window_size

CONFIG_DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A qwen3 config with the class's defaults. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with norms on the heads of queries and keys, before rope."""
    upper = layer >= config.require("max_window_layers", int) and window_size(config) is not None
    window, norm = sliding_window(config, layer, assumed=upper), core.ttpu_norm(config)
    return replace(core.ttpu_attention(config), window=window, q_norm=norm, k_norm=norm)
