"""Conversations as a checkpoint's chat template writes them. The template is part of its transformers tokenizer, which
backends load; this module imports no framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.ranges import short

if TYPE_CHECKING:
    from ttpu_core.checkpoint import Checkpoint


def has_chat_template(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's files hold a chat template, in any of the places where transformers looks."""
    if {"chat_template.jinja", "chat_template.json"} & set(checkpoint.files):
        return True
    file = checkpoint.path / "tokenizer_config.json"
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):  # a damaged file is refused, with its reason, when it is loaded
        return False


def template_text(tokenizer: Any) -> str | None:
    """A tokenizer's chat template, several of them as JSON by name; None where it has none."""
    own = getattr(tokenizer, "chat_template", None)
    return json.dumps(own) if isinstance(own, Mapping) else own


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as text.

    Args:
        tokenizer: the checkpoint's transformers tokenizer.
        messages: turns of {"role", "content"}; a content in parts of text becomes one text.
        template: a Jinja template in place of the tokenizer's.
        tools: functions that the model may call, as OpenAI's API describes them.
        add_generation_prompt: open a reply behind the messages.
        continue_final_message: leave the last message open, so that a reply continues it.
        variables: further variables of the template.

    Raises:
        MissingDependencyError: the checkpoint has no tokenizer.
        RequestError: there is no template, or it refuses the messages.
    """
    given = {"continue_final_message": continue_final_message, **(variables or {})}
    text: str = _applied(tokenizer, messages, template, tools, add_generation_prompt, {"tokenize": False, **given})
    return text


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """A conversation as token ids; special tokens are those that the template writes.

    Args:
        tokenizer, messages, template, tools, add_generation_prompt: as for `chat_text`.

    Raises:
        MissingDependencyError, RequestError: as `chat_text`.
    """
    # Quiet about lengths: who generates compares them with the context, and says so better.
    as_ids = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}
    encoded = _applied(tokenizer, messages, template, tools, add_generation_prompt, as_ids)
    return [int(token) for token in encoded["input_ids"]]


def _applied(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    given: Mapping[str, Any],
) -> Any:
    """What the tokenizer's `apply_chat_template` returns; `given` are its further arguments."""
    if tokenizer is None:
        raise MissingDependencyError(
            "the prompt is a chat, but the checkpoint has no tokenizer files: copy tokenizer.json into it, or pass "
            "token ids."
        )
    if not (template or template_text(tokenizer)):
        raise RequestError(
            "the prompt is a chat, but the checkpoint has no chat template: pass plain text, or use an "
            "instruction-tuned checkpoint."
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(
                f"the prompt is a chat with the message {short(message)}, but each is a mapping with a role, such as "
                '{"role": "user", "content": "..."}: correct it.'
            )
    texts = [_with_one_text(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            texts,
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **given,
        )
    except Exception as error:  # a template raises what its author chose, such as jinja2's TemplateError
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"the chat template refuses these messages ({type(error).__name__}: {reason}): change their roles, "
            "order or content."
        ) from error


def _with_one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its content as one text, for most templates would write a list as Python does."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"the prompt is a chat with the message {short(message)}, but this model reads text alone, and parts of a "
            'content are such as {"type": "text", "text": "..."}: leave others out.'
        )
    return {**message, "content": "".join(map(str, texts))}
