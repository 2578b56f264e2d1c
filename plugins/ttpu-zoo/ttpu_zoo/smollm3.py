"""SmolLM 3 (`model_type` "smollm3"): llama without positions in every fourth layer, which may have a window instead."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.spec import NO_ROPE, AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 128_256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `SmolLM3Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


def has_rope(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has positions: what `no_rope_layers` says of it, or all layers but every fourth.

    Raises:
        ConfigError: `no_rope_layers` has another length than the layers.
    """
    interval, layers = config.positive_int("no_rope_layer_interval"), config.positive_int("num_hidden_layers")
    if config.get("no_rope_layers") is None:
        return (layer + 1) % interval != 0
    flags = config.int_list("no_rope_layers")
    if len(flags) != layers:
        raise ConfigError(
            f"{config.source} has {len(flags)} entries in 'no_rope_layers' for {layers} layers, but one for each is "
            "needed: correct `no_rope_layers` or `num_hidden_layers`."
        )
    return bool(flags[layer])


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a window where `layer_types` says so; without that list in layers without positions, if windows
    are used."""
    used, window = config.flag("use_sliding_window"), config.positive_int("sliding_window", default=None)
    assumed = SLIDING if used and window and not has_rope(config, layer) else FULL
    kind = defaults.layer_type(config, layer, assumed=assumed)
    return replace(
        defaults.ttpu_attention(config), window=config.positive_int("sliding_window") if kind == SLIDING else None
    )


@hookimpl
def ttpu_rope(config: ModelConfig, layer: int, attention: AttentionSpec) -> RopeSpec:
    """Rope with the class's base, or none."""
    rope = rope_from_config(config, head_dim=attention.head_dim, theta=2_000_000.0)
    return rope if has_rope(config, layer) else NO_ROPE
