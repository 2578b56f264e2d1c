"""Phi-3.5-MoE (`model_type` "phimoe"): llama with LayerNorm, and two experts for each token, chosen one after the other
by SparseMixer-v2 (arXiv 2409.12136)."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, HeadSpec, MoESpec, NormSpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 32_064,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "lm_head_bias": False,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
}
NAMES = CheckpointNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `PhimoeConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("rms_norm_eps"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with a window on every layer if the config has one."""
    return replace(defaults.ttpu_attention(config), window=config.positive_int("sliding_window", default=None))


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope whose angles are scaled differently beyond the original context. As in transformers, the frequencies are
    those of short sequences there too.

    Raises:
        ConfigError: the rope is neither plain nor longrope.
    """
    rope = rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if rope.type == "default" or section is None:
        return rope
    if rope.type != "longrope":
        raise ConfigError(
            f"{config.source} asks for rope type {rope.type!r}, but phimoe has 'default' or 'longrope': correct it."
        )
    short, long = section.positive_number("short_mscale"), section.positive_number("long_mscale")
    return replace(rope, attention_factor=short, long_attention_factor=long, long_factor=rope.short_factor)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Two experts per token.

    Raises:
        ConfigError: the config asks for another number of experts per token.
    """
    if config.positive_int("num_experts_per_tok") != 2:
        raise ConfigError(
            f"{config.source} gives each token {config.positive_int('num_experts_per_tok')} experts, but phimoe's "
            "router chooses two: correct `num_experts_per_tok`."
        )
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=2,
        intermediate_size=config.positive_int("intermediate_size"),
        activation=defaults.activation(config),
        router=RouterSpec(score="sparsemixer", jitter=config.number("router_jitter_noise")),
    )


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A head that may have a bias."""
    return replace(defaults.ttpu_head(config), bias=config.flag("lm_head_bias"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names but for the experts'."""
    return standard_mapping(spec, NAMES)
