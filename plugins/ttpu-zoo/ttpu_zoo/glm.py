"""GLM-4-9B (`model_type` "glm"): llama with biases on queries, keys and values, a rope that turns neighbours in half of
each head, and gate and up in one tensor."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import fused_gate_up, replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 151_552,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GlmConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The output has no bias."""
    return replace(defaults.ttpu_attention(config), output_bias=False)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features, in the first part of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True, layout="interleaved")


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, with gate and up in one tensor."""
    return replace_rules(standard_mapping(spec), fused_gate_up(spec))
