"""Code World Model (`model_type` "cwm"): llama with a window in three of four layers."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "mlp_bias": False,
    "sliding_window": 8192,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `CwmConfig`. The sizes that define a model are required."""
    config = config.with_defaults(CONFIG_DEFAULTS)
    if config.section("rope_parameters") is None and config.section("rope_scaling") is None:
        config = config.with_values({"rope_parameters": ROPE})
    return config


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """A window in sliding layers: all but every fourth, unless `layer_types` says otherwise. There are no biases."""
    kind = defaults.layer_type(config, layer, assumed=SLIDING if layer % 4 else FULL)
    window = config.positive_int("sliding_window", default=None) if kind == SLIDING else None
    return replace(defaults.ttpu_attention(config), window=window, qkv_bias=False, output_bias=False)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of a million where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)
