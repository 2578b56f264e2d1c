"""Gemma 3n: four residual streams, of which each layer computes one and predicts the others (AltUp, arXiv
2301.13310), a low-rank side path (Laurel, arXiv 2411.07501), per-layer embeddings, sparse activations in the
first layers, and keys and values shared by the last layers. The hooks answer for the text models and for the text
part of the multimodal ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.defaults import activation
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping, Stack, Tensor
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, standard_mapping
from ttpu_core.mapping.text_part import text_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, EmbeddingSpec, MLPSpec, NormSpec, Parameter, axes
from ttpu_gemma import common
from ttpu_gemma.common import (
    kv_source,
    layer_types,
    note_unused_rope,
    plain_norm,
    rope_by_layer_type,
    ttpu_head,
    window,
)
from ttpu_gemma.gemma3 import CONFIG_DEFAULTS as GEMMA3_DEFAULTS
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

PARENT = "gemma3n"
CONFIG_DEFAULTS: dict[str, Any] = GEMMA3_DEFAULTS | {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
PERIOD = 5  # every fifth layer has full attention
NO_SAY = (
    "query_pre_attn_scalar",  # in published files, though the scale is 1
    "attn_logit_softcapping",
    "altup_coef_clip",  # bounds coefficients in training
    "altup_lr_multiplier",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text model's config with the class's defaults.

    Raises:
        ConfigError: the numbers of AltUp streams do not fit.
    """
    config = text_config(config, PARENT, CONFIG_DEFAULTS)
    config.does_not_matter(NO_SAY, because="transformers reads them in training alone, or not at all")
    note_unused_rope(config, layer_types(config, PERIOD))
    streams, active = config.positive_int("altup_num_inputs"), config.require("altup_active_idx", int)
    if streams < 2 or not 0 <= active < streams:
        raise ConfigError(
            f"{config.source} has {streams} AltUp streams and computes stream {active}, but at least 2 streams are "
            f"needed, counted from 0: correct `altup_num_inputs` or `altup_active_idx`."
        )
    return config


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm that multiplies by w before the cast back."""
    return plain_norm(common.ttpu_norm(config))


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Gemma's embedding expanded to several streams, with per-layer embeddings."""
    own = _per_layer(config)
    streams, hidden = config.positive_int("altup_num_inputs"), own.hidden_size
    projections = Parameter((streams - 1, hidden, hidden), (None, axes.MLP, axes.EMBED))
    altup = (("altup.project.kernel", projections), ("altup.unembed.kernel", projections))
    custom = part("gemma3n_embedding", "gemma3n:StreamEmbedding", (*own.embedding_parameters(), *altup), per_layer=own)
    return replace(common.ttpu_embedding(config), custom=custom)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Norms before and after the sub-layers, with AltUp, Laurel and the per-layer embedding around them."""
    own = _per_layer(config)
    custom = part(
        "gemma3n_block",
        "gemma3n:Block",
        (*own.layer_parameters(), *_block_parameters(config)),
        per_layer=own,
        active=config.require("altup_active_idx", int),
        scale_active=config.flag("altup_correct_scale"),
    )
    return BlockSpec("sandwich", custom=custom)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with normalised queries, keys and values, and a scale of 1."""
    kinds, attention = layer_types(config, PERIOD), defaults.ttpu_attention(config)
    norm = ttpu_norm(config)
    return replace(
        attention,
        scale=1.0,
        window=window(config, kinds[layer]),
        rope=rope_by_layer_type(config, kinds[layer], attention.head_dim),
        q_norm=norm,
        k_norm=norm,
        v_norm=plain_norm(norm, scale=False),
        kv_from_layer=kv_source(config, layer, kinds),
    )


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec:
    """A gated MLP with the layer's own width and sparsity.

    Raises:
        ConfigError: a list has another length than the layers, or a width or sparsity is out of range.
    """
    count = config.positive_int("num_hidden_layers")
    listed = isinstance(config.get("intermediate_size"), tuple)
    key = "intermediate_size"
    widths = config.int_list(key) if listed else (config.positive_int(key),) * count
    usual = (0.95,) * (10 if count > 10 else 0) + (0.0,) * (count - 10 if count > 10 else count)
    sparsity = config.number_list("activation_sparsity_pattern", default=usual)
    for key, values in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if len(values) != count:
            raise ConfigError(
                f"{config.source} gives {len(values)} values as {key!r} for {count} layers, but one per layer is "
                f"needed: correct it, or `num_hidden_layers`."
            )
    if min(widths) < 1 or not all(0 <= share < 1 for share in sparsity):
        raise ConfigError(
            f"{config.source} has a width below 1 in 'intermediate_size', or a share outside 0 to 1 in "
            "'activation_sparsity_pattern': correct it."
        )
    return MLPSpec(widths[layer], activation(config, "hidden_activation"), sparsity=sparsity[layer])


@hookimpl
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names for the usual parts, below `language_model` in a multimodal checkpoint."""
    base = "model.language_model." if spec.model_type == PARENT else "model."
    hidden, streams = spec.hidden_size, config.positive_int("altup_num_inputs")
    rules = dict(_per_layer(config).rules(base))
    for role, name in (("project", "altup_projections"), ("unembed", "altup_unembed_projections")):
        each = tuple(Tensor(f"{base}{name}.{index}.weight", (hidden, hidden)) for index in range(streams - 1))
        rules[f"embed.altup.{role}.kernel"] = Stack(each)
    for layer in range(spec.num_layers):
        where = f"layers.{layer}."
        rules |= tensors(where, _block_parameters(config), "", BLOCK_TENSORS, base + where)
    shared = [i for i, kind in enumerate(spec.layers) if getattr(kind.mixer, "kv_from_layer", None) is not None]
    mapping = replace_rules(standard_mapping(spec, CheckpointNames().below(base)), rules)
    return without_shared_keys(text_mapping(mapping, base), shared)


BLOCK_TENSORS = {
    "altup.scale": "altup.correct_output_scale",
    "altup.correct.kernel": "altup.correction_coefs.weight",
    "altup.predict.kernel": "altup.prediction_coefs.weight",
    "altup.router.kernel": "altup.modality_router.weight",
    "altup.norm.scale": "altup.router_norm.weight",
    "laurel.left.kernel": "laurel.linear_left.weight",
    "laurel.right.kernel": "laurel.linear_right.weight",
    "laurel.norm.scale": "laurel.post_laurel_norm.weight",
}


def _per_layer(config: ModelConfig) -> PerLayerSpec:
    config.positive_int("hidden_size_per_layer_input")
    own = per_layer_spec(config, ttpu_norm(config), activation(config, "hidden_activation"))
    assert own is not None
    return own


def _block_parameters(config: ModelConfig) -> Parameters:
    """The parameters of AltUp and Laurel in each layer."""
    hidden, streams = config.positive_int("hidden_size"), config.positive_int("altup_num_inputs")
    rank = config.positive_int("laurel_rank")
    return (
        ("altup.scale", Parameter((hidden,), (axes.NORM,), "zeros")),
        ("altup.correct.kernel", Parameter((streams, streams), (None, None))),
        ("altup.predict.kernel", Parameter((streams * streams, streams), (None, None))),
        ("altup.router.kernel", Parameter((streams, hidden), (None, axes.EMBED))),
        ("altup.norm.scale", Parameter((hidden,), (axes.NORM,), "ones")),
        ("laurel.left.kernel", Parameter((rank, hidden), (None, axes.EMBED))),
        ("laurel.right.kernel", Parameter((hidden, rank), (axes.EMBED, None))),
        ("laurel.norm.scale", Parameter((hidden,), (axes.NORM,), "ones")),
    )
