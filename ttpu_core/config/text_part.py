"""The config of a multimodal model's text part, with what its parent decides."""

from __future__ import annotations

from collections.abc import Collection

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError

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
