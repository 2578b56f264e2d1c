"""Gemma 4: other head sizes on full-attention layers, values that may equal the keys, shared keys and values,
optional per-layer embeddings, and in the larger models experts beside the dense MLP. The hooks answer for the
text models and for the text part of the multimodal ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.defaults import activation
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import Expression, FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, stacked_experts, standard_mapping
from ttpu_core.mapping.text_part import text_mapping
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    MLPSpec,
    MoESpec,
    Parameter,
    RouterSpec,
    axes,
)
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_gemma import common
from ttpu_gemma.common import (
    FULL,
    THETAS,
    kv_source,
    note_unused_rope,
    plain_norm,
    refuse_bidirectional,
    ttpu_head,
    window,
)
from ttpu_gemma.gemma3 import CONFIG_DEFAULTS as GEMMA3_DEFAULTS
from ttpu_gemma.gemma3n import ttpu_norm
from ttpu_gemma.per_layer import Parameters, PerLayerSpec, part, per_layer_spec, tensors
from ttpu_gemma.text import text_config, without_shared_keys

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

PARENT = "gemma4"
CONFIG_DEFAULTS: dict[str, Any] = GEMMA3_DEFAULTS | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "global_head_dim": 512,
}
PERIOD = 6  # every sixth layer has full attention, and so does the last one


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text model's config with the class's defaults."""
    config = text_config(config, PARENT, CONFIG_DEFAULTS)
    refuse_bidirectional(config, harmless=("vision",))
    note_unused_rope(config, _layer_types(config))
    return config


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Gemma's embedding, with per-layer embeddings if the config has them."""
    own = _per_layer(config)
    if own is None:
        return common.ttpu_embedding(config)
    custom = part("per_layer_embedding", "per_layer:PerLayerEmbedding", own.embedding_parameters(), per_layer=own)
    return replace(common.ttpu_embedding(config), custom=custom)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Norms before and after the sub-layers, three more with experts, and one factor on the layer's output."""
    own, experts = _per_layer(config), _expert_parameters(config)
    if own is None and not experts:
        return BlockSpec("sandwich", layer_scalar=True)
    parameters = (*(own.layer_parameters() if own else ()), *experts)
    custom = part("gemma4_block", "gemma4:Block", parameters, per_layer=own, norm=ttpu_norm(config))
    return BlockSpec("sandwich", layer_scalar=True, custom=custom)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with normalised queries, keys and values, and a scale of 1. Head sizes differ between layer types."""
    kinds, norm = _layer_types(config), ttpu_norm(config)
    kind = kinds[layer]
    changes = _overrides(config, layer, kind)
    attention = defaults.ttpu_attention(config.with_values(changes))
    return replace(
        attention,
        scale=1.0,
        window=window(config, kind),
        rope=_rope(config, kind, attention.head_dim),
        q_norm=norm,
        k_norm=norm,
        v_norm=plain_norm(norm, scale=False),
        value_is_key=config.flag("attention_k_eq_v") and kind == FULL,
        kv_from_layer=kv_source(config, layer, kinds),
    )


EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A gated MLP, alone or beside experts. It is twice as wide on layers with shared keys and values if the config
    says so."""
    act, width = activation(config, "hidden_activation"), config.positive_int("intermediate_size")
    shared = kv_source(config, layer, _layer_types(config)) is not None
    dense = MLPSpec(width * (2 if config.flag("use_double_wide_mlp") and shared else 1), act)
    if not config.flag("enable_moe_block"):
        config.does_not_matter(EXPERT_KEYS, because="there are no experts")
        return dense
    router = RouterSpec(
        renormalize=True,
        norm=plain_norm(ttpu_norm(config), scale=False),
        input_scale=config.positive_int("hidden_size") ** -0.5,
        expert_scale=True,
    )
    return MoESpec(
        num_experts=config.positive_int("num_experts"),
        experts_per_token=config.positive_int("top_k_experts"),
        intermediate_size=config.positive_int("moe_intermediate_size"),
        activation=act,
        router=router,
        dense=dense,
    )


@hookimpl
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names for the usual parts, below `language_model` in a multimodal checkpoint."""
    base = "model.language_model." if spec.model_type == PARENT else "model."
    names = CheckpointNames(
        router="router.proj",
        router_scale="router.scale",
        router_expert_scale="router.per_expert_scale",
    ).below(base)
    own, rules = _per_layer(config), dict[str, Expression | None](stacked_experts(spec, names, "experts."))
    if own is not None:
        rules |= own.rules(base)
    for index in range(spec.num_layers):
        where = f"layers.{index}."
        rules |= tensors(where, _expert_parameters(config), "", EXPERT_NORMS, base + where)
    shared = [i for i, layer in enumerate(spec.layers) if getattr(layer.mixer, "kv_from_layer", None) is not None]
    mapping = replace_rules(standard_mapping(spec, names), rules)
    return without_shared_keys(text_mapping(mapping, base), shared)


EXPERT_NORMS = {
    "dense_post_norm.scale": "post_feedforward_layernorm_1.weight",
    "experts_norm.scale": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm.scale": "post_feedforward_layernorm_2.weight",
}


def _expert_parameters(config: ModelConfig) -> Parameters:
    """A layer's norms for its experts and for the MLP beside them."""
    if not config.flag("enable_moe_block"):
        return ()
    scale = Parameter((config.positive_int("hidden_size"),), (axes.NORM,), "ones")
    return tuple((name, scale) for name in EXPERT_NORMS)


def _layer_types(config: ModelConfig) -> tuple[str, ...]:
    return (*common.layer_types(config, PERIOD)[:-1], FULL)


def _per_layer(config: ModelConfig) -> PerLayerSpec | None:
    return per_layer_spec(config, ttpu_norm(config), activation(config, "hidden_activation"))


def _overrides(config: ModelConfig, layer: int, kind: str) -> dict[str, int]:
    """The layer's own head size and number of KV heads. transformers 5 writes them by layer; published files write
    them for all full-attention layers.

    Raises:
        ConfigError: a layer overrides another key.
    """
    config.does_not_matter("global_head_dim", because="per_layer_config says it, or no layer has full attention")
    kv_heads = config.positive_int("num_global_key_value_heads", default=None)
    by_layer = config.section("per_layer_config")
    if by_layer is None:
        if kind != FULL:
            return {}
        own = {"head_dim": config.positive_int("global_head_dim")}
        if kv_heads is not None and config.flag("attention_k_eq_v"):
            own["num_key_value_heads"] = kv_heads
        return own
    # Layer numbers are zero-padded to one width.
    section = next((by_layer.section(key) for key in by_layer if key.isdecimal() and int(key) == layer), None)
    for key in section or ():
        if key not in ("head_dim", "num_key_value_heads"):
            raise ConfigError(
                f"{config.source} gives layer {layer} its own {key!r}, but gemma 4 lets layers differ in 'head_dim' "
                "and 'num_key_value_heads' only: correct `per_layer_config`."
            )
    return {key: section.positive_int(key) for key in section} if section is not None else {}


def _rope(config: ModelConfig, kind: str, head_dim: int) -> RopeSpec:
    """Rope of a layer type. Without parameters, a quarter of the pairs are rotated on full-attention layers."""
    if config.section("rope_parameters"):
        return rope_from_config(config, head_dim=head_dim, layer_type=kind, theta=THETAS[kind])
    positions = config.positive_int("max_position_embeddings")
    usual = RopeSpec(theta=THETAS[kind], rotary_dim=head_dim, max_position_embeddings=positions)
    return replace(usual, type="proportional", proportion=0.25) if kind == FULL else usual
