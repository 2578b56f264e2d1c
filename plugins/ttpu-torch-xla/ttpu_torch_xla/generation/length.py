"""Determines how many new tokens an answer may have, from the lengths that the caller and the checkpoint give, the
prompt and the model's context. It raises an error where they leave no room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.generation.options import output_length, token_count


def new_tokens(prompt: int, given: Mapping[str, Any], checkpoint: Any, context: int) -> int:
    """Return how many tokens may follow a prompt, by the JAX backend's rules. The caller's lengths take precedence over
    the checkpoint's, and `max_new_tokens` over `max_length`, which counts the prompt. Of the lengths that exceed the
    context, only the caller's `max_new_tokens` is refused; others are lowered.

    Args:
        prompt: tokens of the prompt.
        given: the caller's arguments of `generate`; a `generation_config` among them counts too.
        checkpoint: the model's own generation config.
        context: the most tokens that a sequence may have.

    Raises:
        RequestError: the prompt leaves no room, or the caller asks for more than there is, or for no whole number.
    """
    config = given.get("generation_config")
    asked = _count("max_new_tokens", given.get("max_new_tokens"), config)
    total = _count("max_length", given.get("max_length"), config)
    usual = None
    if asked is None and total is None:
        usual = _count("max_new_tokens", None, checkpoint)
        total = _count("max_length", None, checkpoint) if usual is None else None
    return output_length(prompt, context, asked=asked, total=total, usual=usual)


def _count(name: str, value: Any, config: Any) -> int | None:
    value = getattr(config, name, None) if value is None else value
    return None if value is None else token_count(name, value)
