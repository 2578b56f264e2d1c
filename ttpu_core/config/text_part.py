"""The config of a multimodal model's text part, including the values that its parent decides."""

from __future__ import annotations

from collections.abc import Collection

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def text_config(config: ModelConfig, types: Collection[str], *, tied: bool | None = None) -> ModelConfig:
    """The text model's config: `config` itself, or its `text_config` with the parent's special tokens and tied head.

    Args:
        config: the config of a text model or of a multimodal model.
        types: accepted model types of the text part. The first is used if the text part names none.
        tied: whether the head is tied if the parent does not say so (the default of the parent's transformers
            class); None leaves the choice to the text model.

    Raises:
        ConfigError: the text part has another model type.
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
            f"{config.source} of model_type {config.model_type!r} has a text part of type {found!r}, but the known "
            f"types are {', '.join(types)}: correct `text_config`, or update the plugin."
        )
    text.does_not_matter(decided, because="the parent decides")
    return text.with_values(decided)
