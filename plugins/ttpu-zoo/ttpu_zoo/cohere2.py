"""Command R7B and Command A (`model_type` "cohere2"): cohere with windows in three of four layers, and without
positions in the fourth."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import NO_ROPE, AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_zoo import cohere

SLIDING, FULL = "sliding_attention", "full_attention"

ttpu_norm, ttpu_block, ttpu_head = cohere.ttpu_norm, cohere.ttpu_block, cohere.ttpu_head  # hooks of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Cohere2Config`. The sizes that define a model are required."""
    return config.with_defaults({**cohere.CONFIG_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4})


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a window in sliding layers. Older files write only how often a layer is full."""
    pattern = config.positive_int("sliding_window_pattern")
    kind = defaults.layer_type(config, layer, assumed=SLIDING if (layer + 1) % pattern else FULL)
    return replace(
        defaults.ttpu_attention(config), window=config.positive_int("sliding_window") if kind == SLIDING else None
    )


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features in layers with a window, and none in the others."""
    rope = rope_from_config(config, head_dim=attention.head_dim, layout="interleaved")
    return rope if attention.window else NO_ROPE
