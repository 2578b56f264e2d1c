"""Qwen2 and Qwen2.5 (also QwQ, and models distilled into them): llama with biases on queries, keys and values, and
sliding windows in the upper layers of long-context models."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.spec import AttentionSpec
from ttpu_qwen.layer_types import sliding_window, window_size

CONFIG_DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A qwen2 config with the class's defaults. The sizes that define a model are required."""
    config.does_not_matter("use_mrope", because="for text the three positions of mrope are equal")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with biases on queries, keys and values, whatever the config says, and no bias on the output."""
    upper = layer >= config.require("max_window_layers", int) and window_size(config) is not None
    window = sliding_window(config, layer, assumed=upper)
    return replace(core.ttpu_attention(config), qkv_bias=True, output_bias=False, window=window)
