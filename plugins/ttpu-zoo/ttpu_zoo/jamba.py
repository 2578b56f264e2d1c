"""Jamba (`model_type` "jamba"; arXiv 2403.19887): Mamba's selective scans with norms, attention without positions in
some layers, and a mixture of experts in some."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import NO_ROPE, ArchitectureSpec, AttentionSpec, MixerSpec, MLPSpec, MoESpec
from ttpu_core.spec.rope import RopeSpec
from ttpu_core.spec.selective_scan import selective_scan
from ttpu_zoo.mamba import FORMS, dt_rank

CONFIG_DEFAULTS = {
    "vocab_size": 65_536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "num_experts": 16,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
UNREAD = ("use_mamba_kernels", "num_logits_to_keep", "layers_block_type", "layer_types", *FORMS)
NAMES = CheckpointNames(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate="feed_forward.experts.{expert}.gate_proj",
    expert_up="feed_forward.experts.{expert}.up_proj",
    expert_down="feed_forward.experts.{expert}.down_proj",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `JambaConfig`. The sizes that define a model are required."""
    config.does_not_matter(UNREAD, because="transformers does not read it, or it does not change the results")
    return config.with_renamed({"num_local_experts": "num_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases."""
    return replace(defaults.ttpu_attention(config), qkv_bias=False, output_bias=False)


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: the scans know the order of tokens."""
    return NO_ROPE


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A selective scan, or None in each `attn_layer_period`-th layer."""
    ttpu_attention(config)  # reads its keys for a model without attention, too
    hidden = config.positive_int("hidden_size")
    mixer = selective_scan(
        hidden_size=hidden,
        channels=config.positive_int("mamba_expand") * hidden,
        state_size=config.positive_int("mamba_d_state"),
        dt_rank=dt_rank(config, "mamba_dt_rank"),
        conv_kernel=config.positive_int("mamba_d_conv"),
        activation=defaults.activation(config).name,
        norm="scaled",
        norm_eps=config.positive_number("rms_norm_eps"),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias"),
    )
    return None if _chosen(config, layer, "attn") else mixer


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts in each `expert_layer_period`-th layer, if there are several, else a gated MLP."""
    experts, chosen = config.positive_int("num_experts"), config.positive_int("num_experts_per_tok")
    dense = replace(defaults.ttpu_mlp(config), bias=False)
    if not _chosen(config, layer, "expert") or experts == 1:
        return dense
    return MoESpec(experts, chosen, dense.intermediate_size, dense.activation)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own."""
    return standard_mapping(spec, NAMES)


def _chosen(config: ModelConfig, layer: int, kind: str) -> bool:
    period, offset = config.positive_int(f"{kind}_layer_period"), config.require(f"{kind}_layer_offset", int)
    return layer % period == offset
