"""Apertus (`model_type` "apertus"; arXiv 2509.14233): a plain MLP with xIELU, whose constants are learned, and norms on
heads."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 131_072,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "hidden_act": "xielu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
THETA = 12_000_000.0
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NAMES = CheckpointNames(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `ApertusConfig`. The sizes that define a model are required."""
    config = config.with_defaults(CONFIG_DEFAULTS)
    if config.section("rope_parameters") is None and config.section("rope_scaling") is None:
        config = config.with_values({"rope_parameters": ROPE})
    return config


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with norms on heads."""
    norm = defaults.ttpu_norm(config)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of twelve million where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=THETA)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP without biases."""
    return replace(defaults.ttpu_mlp(config), gated=False)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, but those of a layer's norms."""
    return standard_mapping(spec, NAMES)
