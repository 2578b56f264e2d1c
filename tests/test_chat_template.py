"""Conversations by a checkpoint's chat template: what is rendered, and what is refused before a tokenizer is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.chat_template import chat_text, chat_tokens, has_chat_template, template_text

CHAT = [{"role": "user", "content": "hello"}]


def tokenizer(template: Any = "{{ messages }}", **wrong: Any) -> Any:
    """One whose template writes what it was given."""

    def apply_chat_template(messages: list[Any], **given: Any) -> Any:
        if wrong:
            raise ValueError(wrong["reason"])
        if given.get("conversation"):
            return messages
        return given if given["tokenize"] is False else {"input_ids": [len(messages), given["add_generation_prompt"]]}

    return SimpleNamespace(chat_template=template, apply_chat_template=apply_chat_template)


def test_a_conversation_becomes_text_or_token_ids() -> None:
    given: Any = chat_text(tokenizer(), CHAT, tools=[], continue_final_message=True, variables={"thinking": False})
    assert given == {
        "tools": None, "chat_template": None, "add_generation_prompt": True, "continue_final_message": True,
        "tokenize": False, "thinking": False,
    }  # fmt: skip
    assert chat_tokens(tokenizer(), CHAT) == [1, 1]
    assert chat_tokens(tokenizer(None), CHAT * 2, template="{{ messages }}", add_generation_prompt=False) == [2, 0]


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    for content, text in ((parts, "a b"), ([], ""), ("c", "c"), (None, None)):
        told: Any = chat_text(tokenizer(), [{"role": "user", "content": content}], variables={"conversation": True})
        assert told == [{"role": "user", "content": text}]
    for part in ({"type": "image", "text": "x"}, {"type": "text"}, "x"):
        with pytest.raises(RequestError, match="this model reads text alone"):
            chat_text(tokenizer(), [{"role": "user", "content": [*parts, part]}])


def test_several_templates_are_shown_by_name() -> None:
    assert template_text(tokenizer({"default": "{{ x }}"})) == '{"default": "{{ x }}"}'
    assert template_text(tokenizer(None)) is None and template_text(None) is None


def test_what_has_no_template_or_refuses_the_messages_is_an_error_that_says_so() -> None:
    with pytest.raises(MissingDependencyError, match="no tokenizer files"):
        chat_tokens(None, CHAT)
    with pytest.raises(RequestError, match="no chat template"):
        chat_text(tokenizer(None), CHAT)
    with pytest.raises(RequestError, match=r"refuses these messages \(ValueError: no system\): change their roles"):
        chat_tokens(tokenizer(reason="no\n system"), CHAT)
    for message in ({"content": "hi"}, "hi"):
        with pytest.raises(RequestError, match=r"with the message .*hi.*, but each is a mapping with a role"):
            chat_tokens(tokenizer(), [*CHAT, message])  # type: ignore[list-item]


def test_a_template_is_found_in_the_checkpoints_files(tmp_path: Path) -> None:
    assert has_chat_template(open_checkpoint(tiny.llama_checkpoint(tmp_path / "chat", chat=True)))
    base = tiny.llama_checkpoint(tmp_path / "base")
    assert not has_chat_template(open_checkpoint(base))
    (base / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(open_checkpoint(base))
