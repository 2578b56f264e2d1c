"""OLMo 3: OLMo 2 with sliding windows in most layers, and a separate rope for each kind of layer. The hooks answer
for `model_type` "olmo3" where it differs from the core's defaults."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

from ttpu_olmo import olmo2

SLIDING, FULL = "sliding_attention", "full_attention"
THETA = 500_000.0

ttpu_norm, ttpu_block = olmo2.ttpu_norm, olmo2.ttpu_block  # hooks of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Olmo3Config`."""
    return config.with_defaults({**olmo2.CONFIG_DEFAULTS, "sliding_window": 4096})


def kind_of(config: ModelConfig, layer: int) -> str:
    """The layer's entry in `layer_types`; without that list every fourth layer is full, as in `Olmo3Config`."""
    return defaults.layer_type(config, layer, assumed=SLIDING if (layer + 1) % 4 else FULL)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """OLMo 2's attention, with a window in sliding layers."""
    sliding = kind_of(config, layer) == SLIDING
    return replace(olmo2.ttpu_attention(config), window=config.positive_int("sliding_window") if sliding else None)


@hookimpl
def ttpu_rope(config: ModelConfig, layer: int, attention: AttentionSpec) -> RopeSpec:
    """Rope per kind of layer. What files of transformers 4 say, `rope_theta` and `rope_scaling`, holds for full
    layers."""
    kind = kind_of(config, layer)
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    theta = config.number("rope_theta", default=THETA)
    described = kind == FULL if old is not None else new is not None and kind in new
    if described:
        return rope_from_config(config, head_dim=attention.head_dim, layer_type=kind, theta=THETA, fp32=True)
    return RopeSpec(
        theta=theta if kind == FULL else THETA,
        rotary_dim=attention.head_dim,
        max_position_embeddings=config.positive_int("max_position_embeddings"),
        fp32=True,
    )
