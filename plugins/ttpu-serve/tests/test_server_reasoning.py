"""Reasoning within text is told apart from what is answered, however the text comes in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import running

from ttpu_core.errors import RequestError
from ttpu_serve.reasoning_parsers.installed import parser_for
from ttpu_serve.server import ServerSettings

THINKS = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
CASES = [
    ("<think>Hm. 2 < 3</think>\n\nYes.", None, "Hm. 2 < 3", "Yes."),
    (" \n<think>Hm</think>Yes <think>", None, "Hm", "Yes <think>"),
    ("Yes.", None, "", "Yes."),
    ("<thin air", None, "", "<thin air"),
    ("<think>cut off </thi", None, "cut off </thi", ""),
    ("", None, "", ""),
    ("Hm</think>\nYes", THINKS, "Hm", "Yes"),
    ("Hm", THINKS, "Hm", ""),
]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=200, deadline=None)
def test_reasoning_does_not_depend_on_how_text_is_cut(
    case: tuple[str, str | None, str, str], cuts: list[int]
) -> None:
    text, template, reasoning, content = case
    ends = sorted(min(cut, len(text)) for cut in cuts)
    parser = parser_for("think")
    assert parser is not None
    stream = parser.stream(template)
    pieces = [stream.push(text[start:end]) for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    pieces.append(stream.finish())
    assert "".join(piece[0] for piece in pieces) == reasoning
    assert "".join(piece[1] for piece in pieces) == content


def test_a_parser_that_is_not_installed_is_refused() -> None:
    with pytest.raises(RequestError, match="'wizard' was asked for, but there are think"):
        parser_for("wizard")
    assert parser_for(None) is None


def test_the_chat_endpoint_tells_reasoning_apart_only_where_it_was_asked_to(tmp_path: Path) -> None:
    tokenizer = fake_core.tokenizer(tmp_path / "bytes")
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "say: <think>Hm.</think>\\nYes"}]}
    said = "<think>Hm.</think>\\nYes"
    with running(fake_core.FakeCore(tokenizer)) as server:
        message = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert message["content"] == said and "reasoning_content" not in message
    with running(fake_core.FakeCore(tokenizer), ServerSettings(reasoning_parser="think")) as server:
        message = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "\\nYes")
        chunks = list(server.client().chat.completions.create(stream=True, **asked))
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
        assert "".join(delta.get("content") or "" for delta in deltas) == "\\nYes"
