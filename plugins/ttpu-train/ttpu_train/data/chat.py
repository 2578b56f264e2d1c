"""Conversations as tokens with weights. Where the chat template marks what the assistant says (`{% generation %}`), the
tokenizer gives the mask; elsewhere it comes from rendering the conversation up to each message of the assistant."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ttpu_core.errors import DataError
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import check_characters

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
TOKENS = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}
Encoded = tuple[np.ndarray, np.ndarray]
"""int32 [tokens], and uint8 [tokens]: 1 where a token has weight."""


class ChatEncoder:
    """Renders conversations by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings

    def conversation(self, example: Mapping[str, Any], place: str) -> Encoded:
        """Tokens of `example["messages"]`.

        Raises:
            DataError: messages that are malformed or that the template refuses, or whose assistant cannot be found.
        """
        messages = _messages(example["messages"], "messages", place)
        render = self._options(example, place)
        if self._settings.assistant_only_loss:
            return self._assistant(messages, render, place)
        tokens = self._tokens(messages, render, place)
        return tokens, np.ones(len(tokens), np.uint8)

    def completion(self, example: Mapping[str, Any], place: str) -> Encoded:
        """Tokens of the messages of a prompt and its completion.

        Raises:
            DataError: as for a conversation.
        """
        prompt = _messages(example["prompt"], "prompt", place)
        whole = prompt + _messages(example["completion"], "completion", place)
        render = self._options(example, place)
        if self._settings.assistant_only_loss:
            tokens, weights = self._assistant(whole, render, place)
        else:
            tokens = self._tokens(whole, render, place)
            weights = np.ones(len(tokens), np.uint8)
        if self._settings.completion_only_loss:
            weights[: common_prefix(self._tokens(prompt, render, place, add_generation_prompt=True), tokens)] = 0
        return tokens, weights

    def prompt(self, example: Mapping[str, Any], place: str) -> np.ndarray:
        """Tokens of the messages of `example["prompt"]` and of the beginning of an answer, int32 [tokens].

        Raises:
            DataError: as for a conversation.
        """
        messages = _messages(example["prompt"], "prompt", place)
        return self._tokens(messages, self._options(example, place), place, add_generation_prompt=True)

    def _options(self, example: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Arguments of the template: tools, and what the example adds.

        Raises:
            DataError: tools that are a text but no JSON, or other arguments that are no mapping.
        """
        tools, extra = example.get("tools"), example.get("chat_template_kwargs") or {}
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{place} was given with the field 'tools', but its text is not JSON ({error.msg} at column "
                    f"{error.colno}): write a list of tools, or its JSON."
                ) from error
        if not isinstance(extra, Mapping):
            raise DataError(
                f"{place} was given with the field 'chat_template_kwargs', but it holds {type(extra).__name__} "
                f"{str(extra)[:40]!r}: write a mapping of arguments of the chat template."
            )
        return {"tools": tools, "chat_template": self._settings.chat_template, **extra}

    def _assistant(self, messages: list[Any], render: dict[str, Any], place: str) -> Encoded:
        try:
            template = render["chat_template"] or self._tokenizer.get_chat_template(tools=render["tools"])
        except ValueError as error:
            raise self._refused(messages, render, place, error) from error
        if GENERATION.search(COMMENT.sub("", template)):
            given = self._apply(messages, render, place, **TOKENS, return_assistant_tokens_mask=True)
            tokens, weights = np.asarray(given["input_ids"], np.int32), np.asarray(given["assistant_masks"], np.uint8)
        else:
            tokens, weights = self._by_prefixes(messages, render, place)
        if not weights.any():
            raise DataError(
                f"{place} was given for assistant_only_loss, but no token of it is the assistant's: give each "
                "conversation a message of the role 'assistant', or leave this one out."
            )
        return tokens, weights

    def _by_prefixes(self, messages: list[Any], render: dict[str, Any], place: str) -> Encoded:
        """What the assistant says lies between the text up to it, with the prompt that a model is given there, and the
        text with its message."""
        text: str = self._apply(messages, render, place, tokenize=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._through(messages[:number], text, render, place) if number else ""
            asked = self._apply(messages[:number], render, place, tokenize=False, add_generation_prompt=True)
            last = number == len(messages) - 1
            through = text if last else self._through(messages[: number + 1], text, render, place)
            if through is None or before is None:
                raise DataError(
                    f"{place} was given for assistant_only_loss, but the chat template writes message {number} in "
                    "another way if others follow it, so that the assistant's tokens cannot be told: give the "
                    "tokenizer a chat_template with {% generation %} markers, or pass assistant_only_loss=False."
                )
            start = max(len(before), common_prefix(asked, text))
            spans.append((start, self._end(text, start, len(through))))
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                "assistant_only_loss was asked for, but this tokenizer does not tell which characters a token stands "
                "for: pass a fast tokenizer, or give it a chat_template with {% generation %} markers."
            )
        given = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(given["offset_mapping"], np.int64).reshape(-1, 2)
        weights = np.zeros(len(offsets), np.uint8)
        for start, end in spans:
            weights[(offsets[:, 1] > start) & (offsets[:, 0] < end)] = 1
        return np.asarray(given["input_ids"], np.int32), weights

    def _through(self, messages: list[Any], text: str, render: dict[str, Any], place: str) -> str | None:
        """The text of a conversation's first messages, or None if the whole text does not begin with it."""
        found: str = self._apply(messages, render, place, tokenize=False)
        if text.startswith(found):
            return found
        # Some templates end a conversation, not a message, by the end-of-sequence token, as that of Phi-3.
        found = found.removesuffix(self._tokenizer.eos_token or "")
        closed = found.rstrip().endswith(tuple(self._tokenizer.all_special_tokens))
        return found if closed and text.startswith(found) else None

    def _end(self, text: str, start: int, end: int) -> int:
        """The end of a message without the white space after its last special token, which no model says."""
        said = text[start:end].rstrip()
        closed = said.endswith(tuple(self._tokenizer.all_special_tokens))
        return start + len(said) if closed else end

    def _tokens(self, messages: list[Any], render: dict[str, Any], place: str, **options: Any) -> np.ndarray:
        given = self._apply(messages, render, place, **TOKENS, **options)
        return np.asarray(given["input_ids"], np.int32)

    def _apply(self, messages: list[Any], render: dict[str, Any], place: str, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **{**render, **options})
        except Exception as error:  # a template raises what it likes, most often jinja2's TemplateError
            raise self._refused(messages, render, place, error) from error

    def _refused(self, messages: list[Any], render: dict[str, Any], place: str, error: Exception) -> DataError:
        """Why messages are not rendered."""
        check_characters(json.dumps(messages, ensure_ascii=False, default=str), place)
        if not (render["chat_template"] or getattr(self._tokenizer, "chat_template", None)):
            return DataError(
                f"{place} was given as a conversation, but the tokenizer has no chat template: set its chat_template "
                "and pass it as processing_class, or put a file chat_template.jinja into the checkpoint's folder."
            )
        return DataError(
            f"{place} was given as a conversation, but the tokenizer's chat template refuses it "
            f"({type(error).__name__}: {error}): correct the messages, or give the tokenizer another chat_template."
        )


def common_prefix(one: Sequence[Any] | np.ndarray, other: Sequence[Any] | np.ndarray) -> int:
    """How many items are equal from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _messages(value: Any, field: str, place: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise DataError(
            f"{place} was given as a conversation, but its field {field!r} holds {type(value).__name__} "
            f"{str(value)[:40]!r}: it must be a list of at least one message; correct it."
        )
    for number, message in enumerate(value):
        missing = "role" if not isinstance(message, Mapping) or "role" not in message else None
        if missing is None and "content" not in message and "tool_calls" not in message:
            missing = "content"
        if missing is not None:
            raise DataError(
                f"{place} was given as a conversation, but message {number} of its field {field!r} has no {missing!r}: "
                'write each as {"role": "user", "content": "..."}.'
            )
    return list(value)
