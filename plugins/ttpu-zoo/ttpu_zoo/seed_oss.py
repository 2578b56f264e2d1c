"""Seed-OSS (`model_type` "seed_oss"): llama with biases on queries, keys and values, and one on the output if the
config asks for it."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec

CONFIG_DEFAULTS = {
    "vocab_size": 155_136,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `SeedOssConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The output's bias has a key of its own."""
    return replace(defaults.ttpu_attention(config), output_bias=config.flag("attention_out_bias"))
