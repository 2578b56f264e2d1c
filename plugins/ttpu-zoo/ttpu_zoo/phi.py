"""Phi-1, Phi-1.5 and Phi-2 (`model_type` "phi"): attention and MLP beside each other on one LayerNorm, biases
everywhere, also in the head, and a rope on a part of each head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, HeadSpec, MLPSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 51_200,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": False,
    "qk_layernorm": False,
    "partial_rotary_factor": 0.5,
}
NAMES = CheckpointNames(
    final_norm="model.final_layernorm",
    output="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up="mlp.fc1",
    down="mlp.fc2",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `PhiConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_eps"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_block() -> BlockSpec:
    """Attention and MLP beside each other, on the same norm."""
    return BlockSpec(placement="parallel")


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with biases, and optionally one norm for all heads of queries, and one for all of keys."""
    norm = ttpu_norm(config) if config.flag("qk_layernorm") else None
    return replace(defaults.ttpu_attention(config), qkv_bias=True, output_bias=True, q_norm=norm, k_norm=norm)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first features of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP with biases."""
    return replace(defaults.ttpu_mlp(config), gated=False, bias=True)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A head with a bias."""
    return replace(defaults.ttpu_head(config), bias=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """One tensor per projection."""
    return standard_mapping(spec, NAMES)
