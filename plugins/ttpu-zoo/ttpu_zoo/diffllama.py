"""DiffLlama (`model_type` "diffllama"; arXiv 2410.05258): llama with differential attention."""

from dataclasses import replace
from math import exp

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.spec import AttentionSpec, DifferentialSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `DiffLlamaConfig`."""
    config.does_not_matter("lambda_std_dev", because="it initialises training alone")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Pairs of the config's heads are the halves of a head.

    Raises:
        ConfigError: the number of KV heads is odd.
    """
    attention = defaults.ttpu_attention(config)
    if attention.num_kv_heads % 2:
        raise ConfigError(
            f"{config.source} has {attention.num_kv_heads} key/value heads, but differential attention pairs them: "
            "give an even `num_key_value_heads`."
        )
    return replace(
        attention,
        num_heads=attention.num_heads // 2,
        num_kv_heads=attention.num_kv_heads // 2,
        head_dim=2 * attention.head_dim,
        differential=DifferentialSpec(
            initial=0.8 - 0.6 * exp(-0.3 * layer), norm=replace(defaults.ttpu_norm(config), scale=False)
        ),
    )


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on each half of a head."""
    return rope_from_config(config, head_dim=attention.map_dim)
