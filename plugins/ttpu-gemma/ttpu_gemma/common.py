"""What the gemma models have in common: a scaled embedding, norms that multiply by 1 + w, a capped head, layers of two
types. In: a config; out: parts of its architecture, as hooks and as functions that hooks call."""

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
OLDER_THETAS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}  # where older files have the base
"""Bases of rope by layer type, where a model has two (gemma 3 and later)."""


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm that multiplies by 1 + w before the cast back."""
    return NormSpec(eps=config.positive_number("rms_norm_eps"), offset=1.0, scale_in_fp32=True)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """A table whose rows are multiplied by the square root of their size, in the weights' dtype."""
    hidden = config.positive_int("hidden_size")
    return EmbeddingSpec(config.positive_int("vocab_size"), hidden, scale=hidden**0.5)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """The embedding's table again, with capped logits where the config has a cap."""
    return HeadSpec(
        tied=config.flag("tie_word_embeddings"), softcap=config.positive_number("final_logit_softcapping", default=None)
    )


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP; `hidden_act`, which old files write too, has no say."""
    config.get("hidden_act")
    return MLPSpec(config.positive_int("intermediate_size"), activation(config, "hidden_activation"))


def layer_types(config: ModelConfig, period: int) -> tuple[str, ...]:
    """`layer_type` of every layer."""
    return tuple(layer_type(config, layer, period) for layer in range(config.positive_int("num_hidden_layers")))


def layer_type(config: ModelConfig, layer: int, period: int) -> str:
    """`FULL` or `SLIDING`: what `layer_types` says, or every `period`-th layer full where the config does not write it.

    Raises:
        ConfigError: `layer_types` has another length than the model, or names a type that gemma does not have.
    """
    return defaults.layer_type(config, layer, assumed=SLIDING if (layer + 1) % period else FULL)


def window(config: ModelConfig, kind: str) -> int | None:
    """Tokens that a layer of this type sees."""
    size = config.positive_int("sliding_window", default=None)
    return size if kind == SLIDING else None


def rope_by_layer_type(config: ModelConfig, kind: str, head_dim: int) -> RopeSpec:
    """Rope of a layer type: `rope_parameters` by type, or the older keys, where `rope_theta` and `rope_scaling` are the
    full layers' and `rope_local_base_freq` is the sliding ones'."""
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
    """Count as read what a config says about the rope of layer types that are not among the model's `kinds`."""
    by_type = config.section("rope_parameters")
    for kind, older in OLDER_THETAS.items():
        if kind not in kinds:
            config.get(older)
            unused = by_type.section(kind) if by_type is not None else None
            if unused is not None:
                for key in unused:
                    unused.get(key)


def kv_source(config: ModelConfig, layer: int, kinds: tuple[str, ...]) -> int | None:
    """The layer whose keys and values this one reads; None where it has its own. The last `num_kv_shared_layers` layers
    read those of the last layer of their type, of `kinds`, before them.

    Raises:
        ConfigError: there is no such layer.
    """
    first = len(kinds) - config.require("num_kv_shared_layers", int)
    if layer < first:
        return None
    sources = [index for index in range(first) if kinds[index] == kinds[layer]]
    if not sources:
        raise ConfigError(
            f"{config.source} lets the layers from {first} on read others' keys and values, but none before them is of "
            f"layer {layer}'s type {kinds[layer]!r}: correct `num_kv_shared_layers` or `layer_types`."
        )
    return sources[-1]


def refuse_bidirectional(config: ModelConfig, harmless: tuple[Any, ...] = (False,)) -> None:
    """Refuse a model whose tokens see later ones.

    Raises:
        UnsupportedError: `use_bidirectional_attention` has another value than null and the `harmless` ones.
    """
    value = config.get("use_bidirectional_attention")
    if value is not None and value not in harmless:
        raise UnsupportedError(
            f"{config.source} sets 'use_bidirectional_attention' to {value!r}, so that tokens see later ones, but "
            f"ttpu-gemma describes models that generate, whose tokens see earlier ones only: use it through "
            "transformers, or take a causal checkpoint."
        )


def plain_norm(norm: NormSpec, *, scale: bool = True) -> NormSpec:
    """A norm of the later models, gemma 3n and 4, which multiply by w instead of 1 + w, or by nothing."""
    return replace(norm, offset=0.0, scale=scale)
