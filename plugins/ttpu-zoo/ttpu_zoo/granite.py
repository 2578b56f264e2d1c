"""Granite 3 (`model_type` "granite"): llama whose embeddings, attention scores, sub-layer outputs and logits are each
scaled by a number of the config."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, BlockSpec, EmbeddingSpec, HeadSpec

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GraniteConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Embeddings times `embedding_multiplier`."""
    return replace(defaults.ttpu_embedding(config), scale=config.number("embedding_multiplier"))


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The scale of query-key products is `attention_multiplier`, whatever the heads' size."""
    return replace(defaults.ttpu_attention(config), scale=config.positive_number("attention_multiplier"))


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Sub-layer outputs times `residual_multiplier`."""
    return BlockSpec(residual_multiplier=config.number("residual_multiplier"))


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Logits divided by `logits_scaling`."""
    return replace(defaults.ttpu_head(config), multiplier=1.0 / config.positive_number("logits_scaling"))
