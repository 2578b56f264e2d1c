"""Determines how many new tokens an answer may have, from the lengths that the caller and the checkpoint give, the
prompt and the model's context. It raises an error where they leave no room."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from ttpu_core.errors import RequestError

DEFAULT_MAX_NEW_TOKENS = 128


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
    room = context - prompt
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt:,} tokens, but this model's context holds {context:,} and one must be left for "
            "the answer: shorten the prompt."
        )
    config = given.get("generation_config")
    asked = _count("max_new_tokens", given.get("max_new_tokens"), config)
    total = _count("max_length", given.get("max_length"), config)
    if asked is not None:
        if asked > room:
            raise RequestError(
                f"{asked:,} new tokens were asked for after a prompt of {prompt:,}, but this model's context holds "
                f"{context:,}: ask for at most {room:,}."
            )
        return asked
    usual = None
    if total is None:
        usual = _count("max_new_tokens", None, checkpoint)
        total = _count("max_length", None, checkpoint) if usual is None else None
    if total is not None and total <= prompt:
        raise RequestError(
            f"max_length={total} counts the prompt, which has {prompt} tokens already: raise it, or pass "
            "max_new_tokens."
        )
    return min(room, total - prompt if total is not None else usual or DEFAULT_MAX_NEW_TOKENS)


def _count(name: str, value: Any, config: Any) -> int | None:
    value = getattr(config, name, None) if value is None else value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise RequestError(f"{name} is {value!r}, but an integer of at least 1 is needed: correct it.")
    return int(value)
