"""EXAONE 4 (`model_type` "exaone4"; arXiv 2507.11407): norms after attention and MLP and on each head of queries and
keys, and, where the config has a window, no positions in layers without it."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import NO_ROPE, AttentionSpec, BlockSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG_DEFAULTS = {
    "vocab_size": 102_400,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Exaone4Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_block() -> BlockSpec:
    """A norm after attention and after the MLP, and none before them."""
    return BlockSpec(placement="post")


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a norm for each head, and with a window in sliding layers. `layer_types` decides which those are;
    without it, every fourth layer is full, or as `sliding_window_pattern` says. Beside `layer_types` published files
    have letters there."""
    norm, assumed = defaults.ttpu_norm(config), FULL
    if config.get("layer_types") is None and "sliding_window" in config:
        assumed = SLIDING if (layer + 1) % config.positive_int("sliding_window_pattern") else FULL
    config.get("sliding_window_pattern")
    sliding = defaults.layer_type(config, layer, assumed=assumed) == SLIDING
    window = config.positive_int("sliding_window") if sliding else None
    usual = replace(defaults.ttpu_attention(config), qkv_bias=False, output_bias=False)
    return replace(usual, q_norm=norm, k_norm=norm, window=window)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope in all layers if the config has no window, and else in those with the window."""
    turned = attention.window or "sliding_window" not in config
    return rope_from_config(config, head_dim=attention.head_dim) if turned else NO_ROPE
