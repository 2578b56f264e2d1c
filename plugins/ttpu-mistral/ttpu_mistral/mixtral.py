"""Mixtral: mistral with a mixture of experts instead of the MLP. The hooks answer for `model_type` "mixtral"."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MoESpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

NAMES = CheckpointNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `MixtralConfig`, which knows the number of experts by two names."""
    return config.with_renamed({"num_experts": "num_local_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with a window on every layer if the config has one."""
    return replace(defaults.ttpu_attention(config), window=config.positive_int("sliding_window", default=None))


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with the class's default base."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts whose weights sum to one."""
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=defaults.activation(config),
        router=RouterSpec(renormalize=True),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Experts under the names of the published checkpoints."""
    return standard_mapping(spec, NAMES)
