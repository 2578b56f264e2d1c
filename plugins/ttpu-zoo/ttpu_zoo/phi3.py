"""Phi-3 and Phi-4 (`model_type` "phi3"; arXiv 2404.14219): llama with fused projections, a rope on a part of each head
that may change for long sequences, and a window on every layer if the config has one."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import fused_gate_up, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 32_064,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Phi3Config`. The rope of the first files is called "su" or "yarn", and means
    longrope. The sizes that define a model are required."""
    config = config.with_defaults(CONFIG_DEFAULTS)
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if section and section.get("rope_type", section.get("type")) in ("su", "yarn"):
            config = config.with_values({key: section.with_values({"rope_type": "longrope"})})
    return config


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases, with a window if the config has one."""
    usual = replace(defaults.ttpu_attention(config), qkv_bias=False, output_bias=False)
    return replace(usual, window=config.positive_int("sliding_window", default=None))


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first features of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, with queries, keys and values in one tensor, and gate and up in one."""
    return replace_rules(standard_mapping(spec), fused_qkv(spec) | fused_gate_up(spec))
