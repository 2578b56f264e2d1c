"""LFM2-8B-A1B (`model_type` "lfm2_moe"): LFM2 with experts after the first dense layers, chosen by corrected sigmoid
scores."""

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.spec import ArchitectureSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_zoo import lfm2

CONFIG_DEFAULTS = {
    "vocab_size": 65_536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
NAMES = replace(
    lfm2.NAMES,
    router="feed_forward.gate",
    correction_bias="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{expert}.w1",
    expert_up="feed_forward.experts.{expert}.w3",
    expert_down="feed_forward.experts.{expert}.w2",
)

ttpu_norm, ttpu_attention, ttpu_rope = lfm2.ttpu_norm, lfm2.ttpu_attention, lfm2.ttpu_rope  # hooks of this module too
ttpu_mixer = lfm2.ttpu_mixer


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Lfm2MoeConfig`. The sizes that define a model are required."""
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    return config.with_renamed({"tie_embedding": "tie_word_embeddings"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP in the first layers, then experts."""
    experts = MoESpec(
        num_experts=config.positive_int("num_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("moe_intermediate_size"),
        router=RouterSpec(
            score="sigmoid",
            correction_bias=config.flag("use_expert_bias"),
            renormalize=config.flag("norm_topk_prob"),
            renormalize_eps=1e-6,
            scaling_factor=config.number("routed_scaling_factor"),
        ),
    )
    dense = layer < config.require("num_dense_layers", int)
    return MLPSpec(config.positive_int("intermediate_size")) if dense else experts


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """LFM2's names."""
    return standard_mapping(spec, NAMES)
