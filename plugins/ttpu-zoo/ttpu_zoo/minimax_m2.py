"""MiniMax-M2 (`model_type` "minimax_m2"): a mixture of experts in each layer, chosen by corrected sigmoid scores, norms
over all heads of queries and of keys, and a rope on a part of each head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MoESpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 200_064,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
THETA = 5_000_000.0
NAMES = CheckpointNames(
    router="block_sparse_moe.gate",
    correction_bias="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)
OTHER_CODE = ("attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "qk_norm_type", "scoring_func", "use_mtp",
              "shared_intermediate_size", "use_qk_norm", "use_routing_bias", "auto_map")  # fmt: skip


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `MiniMaxM2Config`. `rotary_dim` of published files is the share of a
    head that is rotated. The sizes that define a model are required."""
    config.does_not_matter(OTHER_CODE, because="the code that MiniMax publishes reads them, and transformers does not")
    config = config.with_renamed({"num_experts": "num_local_experts"}).with_defaults(CONFIG_DEFAULTS)
    rotated = config.positive_int("rotary_dim", default=None)
    if rotated is None or config.get("partial_rotary_factor") is not None:
        return config
    return config.with_values({"partial_rotary_factor": rotated / config.positive_int("head_dim")})


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The norms see the whole projection, before it is split into heads. There are no biases."""
    norm = defaults.ttpu_norm(config)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, qk_norm_scope="full")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first part of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True, theta=THETA)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts chosen by sigmoid scores that a bias corrects. Weights are the uncorrected scores, renormalised."""
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=defaults.activation(config),
        router=RouterSpec(score="sigmoid", renormalize=True, correction_bias=True),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Mixtral's names."""
    return standard_mapping(spec, NAMES)
