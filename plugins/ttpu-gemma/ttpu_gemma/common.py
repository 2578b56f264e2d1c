"""Hooks and functions that the gemma models share: a scaled embedding, norms that multiply by 1 + w, a head with
capped logits, and layers of two types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.defaults import activation
from ttpu_core.errors import ConfigError, UnsupportedError
from ttpu_core.spec import EmbeddingSpec, HeadSpec, MLPSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
OLDER_THETAS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""Keys of the rope base by layer type in older files, for models with two bases (gemma 3 and later)."""


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm that multiplies by 1 + w before the cast back."""
    return NormSpec(eps=config.positive_number("rms_norm_eps"), offset=1.0, scale_in_fp32=True)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """A table whose rows are multiplied by the square root of the hidden size, in the weights' dtype."""
    hidden = config.positive_int("hidden_size")
    return EmbeddingSpec(config.positive_int("vocab_size"), hidden, scale=hidden**0.5)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A head with the config's tie and logit cap."""
    return HeadSpec(
        tied=config.flag("tie_word_embeddings"), softcap=config.positive_number("final_logit_softcapping", default=None)
    )


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP."""
    config.does_not_matter("hidden_act", because="old files contain it beside hidden_activation, which is the one read")
    return MLPSpec(config.positive_int("intermediate_size"), activation(config, "hidden_activation"))


def layer_types(config: ModelConfig, period: int) -> tuple[str, ...]:
    """`layer_type` of every layer."""
    return tuple(layer_type(config, layer, period) for layer in range(config.positive_int("num_hidden_layers")))


def layer_type(config: ModelConfig, layer: int, period: int) -> str:
    """The type of a layer, `FULL` or `SLIDING`: from `layer_types`, or every `period`-th layer is full if the config
    lacks it.

    Raises:
        ConfigError: `layer_types` has another length than the model, or names an unknown type.
    """
    return defaults.layer_type(config, layer, assumed=SLIDING if (layer + 1) % period else FULL)


def window(config: ModelConfig, kind: str) -> int | None:
    """The window in tokens of a layer of this type, or None."""
    size = config.positive_int("sliding_window", default=None)
    return size if kind == SLIDING else None


def rope_by_layer_type(config: ModelConfig, kind: str, head_dim: int) -> RopeSpec:
    """Rope of a layer type: from `rope_parameters` by type, or from the older keys, where `rope_theta` and
    `rope_scaling` apply to full layers and `rope_local_base_freq` to sliding layers."""
    scaling, by_type = config.section("rope_scaling"), config.section("rope_parameters")
    own = by_type.section(kind) if by_type is not None else None
    older = OLDER_THETAS[kind]
    if own is not None and not scaling:
        return rope_from_config(config, head_dim=head_dim, layer_type=kind, theta=THETAS[kind], theta_key=older)
    if kind == FULL and scaling:
        return rope_from_config(config, head_dim=head_dim, theta=THETAS[kind])
    theta = config.number(older, default=THETAS[kind])
    positions = config.positive_int("max_position_embeddings")
    return RopeSpec(theta=theta, rotary_dim=head_dim, max_position_embeddings=positions)


def note_unused_rope(config: ModelConfig, kinds: Iterable[str]) -> None:
    """Say that rope parameters of layer types that the model does not have cannot matter."""
    by_type = config.section("rope_parameters")
    for kind, older in OLDER_THETAS.items():
        if kind not in kinds:
            why = f"no layer has {kind}"
            config.does_not_matter(older, because=why)
            if by_type is not None:
                by_type.does_not_matter(kind, because=why)


def kv_source(config: ModelConfig, layer: int, kinds: tuple[str, ...]) -> int | None:
    """The layer whose keys and values this layer reads, or None if it has its own. The last `num_kv_shared_layers`
    layers read from the last earlier layer of the same type in `kinds`.

    Raises:
        ConfigError: there is no such layer.
    """
    first = len(kinds) - config.require("num_kv_shared_layers", int)
    if layer < first:
        return None
    sources = [index for index in range(first) if kinds[index] == kinds[layer]]
    if not sources:
        raise ConfigError(
            f"{config.source} lets the layers from {first} on read others' keys and values, but no earlier layer has "
            f"the type {kinds[layer]!r} of layer {layer}: correct `num_kv_shared_layers` or `layer_types`."
        )
    return sources[-1]


def refuse_bidirectional(config: ModelConfig, harmless: tuple[Any, ...] = (False,)) -> None:
    """Refuse a model whose tokens attend to later tokens.

    Raises:
        UnsupportedError: `use_bidirectional_attention` has another value than null or one of `harmless`.
    """
    value = config.get("use_bidirectional_attention")
    if value is not None and value not in harmless:
        raise UnsupportedError(
            f"{config.source} sets 'use_bidirectional_attention' to {value!r}, so that tokens see later ones, but "
            f"ttpu-gemma describes models that generate, whose tokens see earlier ones only: use it through "
            "transformers, or take a causal checkpoint."
        )


def plain_norm(norm: NormSpec, *, scale: bool = True) -> NormSpec:
    """The norm of gemma 3n and 4, which multiplies by w instead of 1 + w, or has no scale."""
    return replace(norm, offset=0.0, scale=scale)
