"""Llama: grouped-query attention, RMSNorm before each sub-layer, and a gated SiLU MLP. This `model_type` covers
Llama 1 to 3.3, Code Llama, TinyLlama, SmolLM and every other checkpoint of that layout.

The core's defaults describe this architecture, so the plugin adds only the default values of `LlamaConfig`."""

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
    """A llama config with the class's defaults. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)
