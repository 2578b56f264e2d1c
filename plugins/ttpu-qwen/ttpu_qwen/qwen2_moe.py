"""Qwen1.5-MoE and Qwen2-57B-A14B: qwen2 with routed experts and a gated shared expert. If windows are used, every
other layer has one."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, stacked_experts, standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec
from ttpu_qwen.experts import SHARED_EXPERT, experts, is_sparse
from ttpu_qwen.layer_types import sliding_window

CONFIG_DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
}
NAMES = CheckpointNames(shared_gate_up_down=SHARED_EXPERT)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A qwen2_moe config with the class's defaults."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with biases on queries, keys and values only. If windows are used, even layers below
    `max_window_layers` slide."""
    slides = layer % 2 == 0 and layer < config.require("max_window_layers", int) and config.flag("use_sliding_window")
    window = sliding_window(config, layer, assumed=slides)
    return replace(core.ttpu_attention(config), qkv_bias=config.flag("qkv_bias"), output_bias=False, window=window)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts with a shared one beside them, or a dense MLP."""
    renormalize = config.flag("norm_topk_prob")
    return experts(config, renormalize=renormalize, shared=True) if is_sparse(config, layer) else core.ttpu_mlp(config)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, with a single shared expert."""
    return with_alternative(standard_mapping(spec, NAMES), stacked_experts(spec, NAMES))
