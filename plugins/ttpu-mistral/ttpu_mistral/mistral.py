"""Mistral 7B and Ministral 8B: llama with sliding windows. The hooks answer for `model_type` "mistral" and
"ministral".

If a config has `layer_types`, they say which layers have the window; transformers then calls the model ministral."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `MistralConfig` and `MinistralConfig`. A null window means no window."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a window on every layer, or on the layers that `layer_types` names."""
    window = config.positive_int("sliding_window", default=None)
    if config.get("layer_types") is not None and defaults.layer_type(config, layer) == "full_attention":
        window = None
    return replace(defaults.ttpu_attention(config), window=window)
