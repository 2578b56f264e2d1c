"""The text model as a part of a multimodal one. In: a config that may have a `text_config`, and the mapping of a text
model; out: the text model's config with what its parent decides, and a mapping that finds the text model's tensors
wherever multimodal checkpoints have had them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""What stands before the text model's tensors: multimodal models in the forms that transformers 5 and 4 write, text
models, and their bases alone."""

HEADS = ("lm_head.", "language_model.lm_head.")

OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
)
"""Tensors of the towers for pictures and sound, and of what leads from them to the text model."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def text_config(config: ModelConfig, types: Collection[str], *, tied: bool | None = None) -> ModelConfig:
    """The text model's config: `config` itself, or its `text_config` with the special tokens and the head that the
    parent decides.

    Args:
        types: model types that the text model may have; one that names none has the first.
        tied: whether the head shares the embedding where the parent is silent, as the parent's class in transformers
            has it; None leaves that to the text model.

    Raises:
        ConfigError: a text model of another type.
    """
    text = config.section("text_config")
    if text is None:
        return config
    decided = {key: config.get(key) for key in SPECIAL_TOKENS if key in config}
    shared = config.flag("tie_word_embeddings", default=tied)
    if shared is not None:
        decided["tie_word_embeddings"] = shared
    found = text.text("model_type", default=next(iter(types)))
    if found not in types:
        raise ConfigError(
            f"{config.source} of model_type {config.model_type!r} has a text part of type {found!r}, but "
            f"{', '.join(types)} {'is' if len(types) == 1 else 'are'} known there: correct `text_config`, or update "
            "the plugin."
        )
    for key in decided:
        text.get(key)
    return text.with_values(decided)


def text_mapping(mapping: FlaxMapping, base: str = "model.", head: str = "lm_head") -> FlaxMapping:
    """A text model's mapping, whose names lie below `base` and whose head is `head`, for multimodal checkpoints too:
    tensors are found below any of `PREFIXES`, and what pictures and sound need is left out."""
    heads = tuple((other, f"{head}.") for other in HEADS if other != f"{head}.")
    bases = tuple((other, base) for other in PREFIXES if other != base)
    return replace(mapping, ignored=(*mapping.ignored, OTHER_PARTS), prefixes=(*heads, *bases))
