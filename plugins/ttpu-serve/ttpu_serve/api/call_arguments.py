"""What a call of `LLM` may be given in several forms: prompts, and values for all of them or for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.execution.input_processor import PromptInput


def list_of_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt, of any form, or several as a list.

    Raises:
        RequestError: the value is no prompt.
    """
    if not isinstance(prompts, str | Mapping | Sequence) and not hasattr(prompts, "tolist"):
        raise RequestError(
            f"prompts is {prompts!r}, but a text, a list of token ids, a mapping with one of them, or a list of these "
            "is needed: pass one of them."
        )
    one = isinstance(prompts, str | Mapping) or getattr(prompts, "ndim", 2) == 1
    if one or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):  # type: ignore[index]
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def values_for_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value for each prompt, of a value for all or of one for each.

    Raises:
        RequestError: there are not as many values as prompts.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts were given with {len(value)} {name}: pass one, or one for each prompt.")
    return list(value)


def places_of(name: str, count: int, kind: str) -> list[str | None]:
    """Return words for each of several prompts, by which an error's note names them; a single one needs none."""
    return [f"{name}[{number}] of {count} {kind}" for number in range(count)] if count > 1 else [None] * count


def prompt_text(prompt: PromptInput) -> str | None:
    """Return the text of a prompt; None of one that is given by its token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def prompt_salt(prompt: PromptInput) -> str | None:
    """Return what keeps the prompt's cached pages apart from those of other prompts, if it has such a salt."""
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def with_values(message: Any) -> Any:
    """Return a message in which arguments of tool calls are values, as templates expect them: in OpenAI's form they are
    JSON text, which templates would write as a string."""
    try:
        calls = message["tool_calls"] or ()
        read = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError):  # there are none, or they have another form
        return message
    return {**message, "tool_calls": read}
