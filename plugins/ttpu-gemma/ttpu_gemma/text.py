"""The text model as a part of a multimodal one. In: a parent's config and the names of its checkpoint; out: the text
model's config and mapping, where everything that pictures and sound need is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttpu_core import ModelConfig
from ttpu_core.layout import CheckpointNames, standard_mapping
from ttpu_core.mapping import FlaxMapping
from ttpu_core.spec import ArchitectureSpec

OTHER_PARTS = r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
"""Tensors of the towers for pictures and sound, and of what leads from them to the text model."""

WHERE = ("model.", "language_model.model.", "model.language_model.")
"""What stands before the text model's tensors, in text models and in the forms that multimodal ones have had."""


def text_config(config: ModelConfig, parent: str, defaults: Mapping[str, Any]) -> ModelConfig:
    """The text model's config with its class's defaults: `config` itself, or the `text_config` of a `parent`.

    Raises:
        ConfigError: a parent without a `text_config`.
    """
    if config.model_type != parent:
        return config.with_defaults(defaults)
    # transformers ties by the parent's key, and generates by its special tokens.
    own = {"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)}
    own |= {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    text = config.require("text_config", ModelConfig)
    for key in ("model_type", *own):
        text.get(key)
    return text.with_defaults(defaults).with_values(own)


@dataclass(frozen=True)
class TextNames(CheckpointNames):
    """The usual names below `base`, one of `WHERE`."""

    base: str = "model."


def text_names(base: str, head: str = "lm_head") -> TextNames:
    """The usual names below `base`."""
    return TextNames(
        base=base,
        layer=base + "layers.{layer}.",
        embedding=base + "embed_tokens.weight",
        final_norm=base + "norm",
        head=head,
    )


def text_mapping(spec: ArchitectureSpec, names: TextNames) -> FlaxMapping:
    """The usual mapping by these names, which finds tensors below the rest of `WHERE` too."""
    mapping = standard_mapping(spec, names)
    other_head = "language_model.lm_head." if names.head == "lm_head" else "lm_head."
    others = sorted((where for where in WHERE if where != names.base), key=len, reverse=True)
    return replace(
        mapping,
        ignored=(*mapping.ignored, OTHER_PARTS),
        prefixes=((other_head, f"{names.head}."), *((where, names.base) for where in (*others, ""))),
    )


def without_shared_keys(mapping: FlaxMapping, shared: Iterable[int]) -> FlaxMapping:
    """The mapping, with what checkpoints hold for layers that read others' keys and values, and never use."""
    layers = "|".join(map(str, shared))
    unused = rf".*layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return replace(mapping, ignored=(*mapping.ignored, unused)) if layers else mapping
