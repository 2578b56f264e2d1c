"""HyperCLOVA X (`model_type` "hyperclovax"): Granite with norms after each sub-layer too, and logits that are
multiplied."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, HeadSpec, Placement
from ttpu_zoo import granite

CONFIG_DEFAULTS = {**granite.CONFIG_DEFAULTS, "attention_multiplier": None, "use_post_norm": True}
NAMES = CheckpointNames(
    post_attention_norm="post_norm1", mlp_norm="post_attention_layernorm", post_mlp_norm="post_norm2"
)

ttpu_embedding = granite.ttpu_embedding  # a hook of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `HyperCLOVAXConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The scale of query-key products is `attention_multiplier`, or follows from the heads' size without it."""
    usual = defaults.ttpu_attention(config)
    return replace(usual, scale=config.positive_number("attention_multiplier", default=usual.softmax_scale))


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Norms before and after each sub-layer, unless `use_post_norm` is off, and outputs times `residual_multiplier`."""
    placement: Placement = "sandwich" if config.flag("use_post_norm") else "pre"
    return BlockSpec(placement=placement, residual_multiplier=config.number("residual_multiplier"))


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Logits times `logits_scaling`, by which Granite divides."""
    return replace(defaults.ttpu_head(config), multiplier=config.number("logits_scaling"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names but those of the norms."""
    return standard_mapping(spec, NAMES)
