"""Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: qwen3 with routed experts and no shared expert. If windows are
used, every layer has one."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import stacked_experts, standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec
from ttpu_qwen.experts import experts, is_sparse
from ttpu_qwen.layer_types import window_size

CONFIG_DEFAULTS = {
    "vocab_size": 151_936,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A qwen3_moe config with the class's defaults."""
    config.does_not_matter("max_window_layers", because="in this type every layer slides or none does")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with norms on the heads of queries and keys, before rope."""
    norm = core.ttpu_norm(config)
    return replace(core.ttpu_attention(config), window=window_size(config), q_norm=norm, k_norm=norm)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts, or a dense MLP."""
    renormalize = config.flag("norm_topk_prob")
    return experts(config, renormalize=renormalize, shared=False) if is_sparse(config, layer) else core.ttpu_mlp(config)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names."""
    return with_alternative(standard_mapping(spec), stacked_experts(spec))
