"""Which variables a request may give to a chat template: those that are no arguments of rendering itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.ranges import short

OURS = frozenset(
    {"messages", "conversation", "tools", "tokenize", "chat_template", "return_dict", "return_tensors", "documents"}
    | {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length", "tokenizer_kwargs"}
    | {"self", "conversations", "return_assistant_tokens_mask"}
)
"""Arguments of templates that are no variables of their own: requests have fields for those that they may set."""


def check_variables(given: Any) -> None:
    """Check `chat_template_kwargs`; None is allowed.

    Raises:
        RequestError: it is no mapping of names, or has a name of `OURS`.
    """
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(
            f"chat_template_kwargs is {short(given)}, but a mapping from names to values is needed: correct it.",
            param="chat_template_kwargs",
        )
    if taken := OURS & set(given):
        raise RequestError(
            f"chat_template_kwargs has {min(taken)!r}, but only variables of the template itself are allowed: leave it "
            "out, or use the field or argument of that name if there is one.",
            param="chat_template_kwargs",
        )
