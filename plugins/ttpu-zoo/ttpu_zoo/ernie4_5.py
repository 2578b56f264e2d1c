"""ERNIE 4.5 (`model_type` "ernie4_5"): llama with a rope that turns neighbouring features in float32, and one key for
all biases."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, MLPSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 103_424,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Ernie4_5Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Biases if `use_bias` says so."""
    bias = config.flag("use_bias", default=False)
    return replace(defaults.ttpu_attention(config), qkv_bias=bias, output_bias=bias)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features, with the class's base; cos and sin stay in float32."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=500_000.0, layout="interleaved", fp32=True)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP, with biases if `use_bias` says so."""
    return replace(defaults.ttpu_mlp(config), bias=config.flag("use_bias", default=False))
