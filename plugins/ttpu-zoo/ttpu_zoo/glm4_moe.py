"""GLM-4.5 and GLM-4.6 (`model_type` "glm4_moe"): a rope on half of each head, and DeepSeek-V3's mixture of experts
after the first dense layers."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping, without_further_layers
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 151_552,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
RENAMED = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Glm4MoeConfig`. The sizes that define a model are required."""
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    return config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Biases on queries, keys and values only, and optional norms on the heads of queries and keys."""
    norm = defaults.ttpu_norm(config) if config.flag("use_qk_norm") else None
    return replace(defaults.ttpu_attention(config), output_bias=False, q_norm=norm, k_norm=norm)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first part of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP in the first layers, then experts chosen by corrected scores within the best groups, with a shared
    expert."""
    if layer < config.require("first_k_dense_replace", int):
        return defaults.ttpu_mlp(config)
    activation, inner = defaults.activation(config), config.positive_int("moe_intermediate_size")
    return MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        router=RouterSpec(
            score="sigmoid",
            renormalize=config.flag("norm_topk_prob"),
            renormalize_eps=1e-20,
            correction_bias=True,
            groups=config.positive_int("n_group"),
            top_groups=config.positive_int("topk_group"),
            group_score="top2_sum",
            scaling_factor=config.number("routed_scaling_factor"),
        ),
        shared=MLPSpec(inner * config.positive_int("n_shared_experts"), activation),
    )


@hookimpl
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names. The layers that predict further tokens are left out."""
    return without_further_layers(standard_mapping(spec), spec, config.require("num_nextn_predict_layers", int))
