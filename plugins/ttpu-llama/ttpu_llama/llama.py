"""Llama: grouped-query attention, RMSNorm before each sub-layer, a gated SiLU MLP. The same `model_type` serves
Llama 1 to 3.3, Code Llama, TinyLlama, SmolLM and every other checkpoint of that layout.

The core's defaults are this architecture, so the plugin states only what `LlamaConfig` assumes of an absent key."""

from ttpu_core import ModelConfig, hookimpl

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A llama config with the class's defaults; the sizes that make a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)
