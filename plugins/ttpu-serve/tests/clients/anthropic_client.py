"""Anthropic's own client, which asks /v1/messages."""

from __future__ import annotations

from typing import Any

import harness
from anthropic import Anthropic, BadRequestError

CLIENT = Anthropic(base_url=harness.URL, api_key="none", max_retries=0)
ASKED: Any = {
    "model": harness.MODEL,
    "max_tokens": 12,
    "extra_body": {"temperature": 0.0},
    "messages": [{"role": "user", "content": "How do I open a file?"}],
}
TOOL: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@harness.case
def message() -> None:
    """a message, whole and streamed"""
    whole = CLIENT.messages.create(**ASKED)
    assert whole.content[0].text and 0 < whole.usage.output_tokens <= 12
    with CLIENT.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage == whole.usage


@harness.case
def tool() -> None:
    """a tool that must be called"""
    choice = {"type": "tool", "name": "weather"}
    answer = CLIENT.messages.create(**{**ASKED, "max_tokens": 60}, tools=[TOOL], tool_choice=choice)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "weather" and call.input["city"] in ("Oslo", "Rome")


@harness.case
def refusal() -> None:
    """a refusal, as the client's own exception"""
    try:
        CLIENT.messages.create(**{**ASKED, "extra_body": {"temperature": 9.0}})
    except BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("it was not refused")


harness.main()
