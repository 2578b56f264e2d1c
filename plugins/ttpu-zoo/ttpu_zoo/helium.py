"""Helium 1 (`model_type` "helium"): llama with a rope that turns neighbouring features, and norms that scale in
float32."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 48_000,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `HeliumConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """`HeliumRMSNorm` multiplies by its weight before the cast back to the activations' dtype."""
    return NormSpec(eps=config.positive_number("rms_norm_eps"), scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The output has no bias."""
    return replace(defaults.ttpu_attention(config), output_bias=False)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features, with the class's base."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=100_000.0, layout="interleaved")
