"""Gemma 3: gemma 2's block with normalised queries and keys instead of caps, five sliding layers for each full
layer, and a separate rope for each layer type. The hooks answer for the text models and for the text part of the
multimodal ones (including MedGemma and ShieldGemma 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.mapping.text_part import text_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec
from ttpu_gemma.common import (
    layer_types,
    note_unused_rope,
    refuse_bidirectional,
    rope_by_layer_type,
    ttpu_embedding,
    ttpu_head,
    ttpu_mlp,
    ttpu_norm,
    window,
)
from ttpu_gemma.gemma2 import CONFIG_DEFAULTS as GEMMA2_DEFAULTS
from ttpu_gemma.gemma2 import ttpu_block
from ttpu_gemma.text import text_config

__all__ = [
    "ttpu_attention",
    "ttpu_block",
    "ttpu_config",
    "ttpu_embedding",
    "ttpu_flax_mapping",
    "ttpu_head",
    "ttpu_mlp",
    "ttpu_norm",
]

PARENT = "gemma3"
CONFIG_DEFAULTS: dict[str, Any] = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text model's config with the class's defaults."""
    config = text_config(config, PARENT, CONFIG_DEFAULTS)
    refuse_bidirectional(config)
    config.does_not_matter("attn_logit_softcapping", because="transformers reads the cap without applying it")
    config.does_not_matter("_sliding_window_pattern", because="transformers made layer_types from it")
    note_unused_rope(config, _layer_types(config))
    return config


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Grouped-query attention with normalised queries and keys, with a window on sliding layers."""
    kind = _layer_types(config)[layer]
    attention, norm = defaults.ttpu_attention(config), ttpu_norm(config)
    return replace(
        attention,
        scale=config.positive_number("query_pre_attn_scalar") ** -0.5,
        window=window(config, kind),
        rope=rope_by_layer_type(config, kind, attention.head_dim),
        q_norm=norm,
        k_norm=norm,
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, below `language_model` in a multimodal checkpoint."""
    below = ("model.", "lm_head")
    if spec.model_type == PARENT:
        below = ("language_model.model.", "language_model.lm_head")
    return text_mapping(standard_mapping(spec, CheckpointNames().below(*below)), *below)


def _layer_types(config: ModelConfig) -> tuple[str, ...]:
    return layer_types(config, config.positive_int("sliding_window_pattern"))
