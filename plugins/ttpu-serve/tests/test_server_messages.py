"""/v1/messages, asked by Anthropic's own client over a socket; a core without a model answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_core import FakeCore, tokenizer
from serving import Running, running

from ttpu_serve.server import ServerSettings
from ttpu_serve.server.blocks import Blocks
from ttpu_serve.server.errors import ApiError, anthropic_body
from ttpu_serve.server.turn import New
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, CallBreaks, CallEnds, Content

anthropic = pytest.importorskip("anthropic")

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}{% for message in messages %}"
    "{{ message['role'][0] }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments['city'] }}</tool_call>{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
WEATHER: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


HI: Any = {"role": "user", "content": "hi"}
CALLED: Any = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
DEEP: Any = {}
for _ in range(200):
    DEEP = {"a": DEEP}


def used(**more: Any) -> Any:
    """A conversation with one call."""
    return {"system": "x", "messages": [HI, {"role": "assistant", "content": [{**CALLED, **more}]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replies = {
        "ponder": "<think>hm</think>yes",
        "weather in Łódź": f"I look.{CALL}",
        "half a call": '<tool_call>{"name": "weather", "arguments": {"city": ',
    }
    core = FakeCore(tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE), max_model_len=2048, replies=replies)
    settings = ServerSettings(model_names=("main",), api_keys=("secret",), max_choices=1, reasoning_parser="think")
    with running(core, settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def ask(client: Any, text: str, **more: Any) -> Any:
    asked = {"model": "main", "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    return client.messages.create(**{**asked, **more})


def test_a_message_is_answered(client: Any) -> None:
    answer = ask(client, "say: hello wörld", system="Be kind.")
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "main", "end_turn")
    assert [(block.type, block.text) for block in answer.content] == [("text", "hello wörld")]
    prompt = "s:Be kind.\nu:say: hello wörld\na:"
    assert answer.usage.input_tokens == len(prompt.encode())
    assert answer.usage.output_tokens == len("hello wörld".encode()) + 1, "the end of sequence is a token"
    assert (answer.usage.cache_creation_input_tokens, answer.usage.cache_read_input_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "one"),
        ({"stop_sequences": ["tw"]}, "stop_sequence", "tw", "one "),
        ({}, "end_turn", None, "one two"),
    ],
)
def test_it_says_why_it_ended(client: Any, asked: Any, reason: str, sequence: str | None, text: str) -> None:
    answer = ask(client, "say: one two", **asked)
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == (reason, sequence, text)


def test_a_stream_says_the_same(client: Any) -> None:
    asked: Any = {"model": "main", "max_tokens": 200, "messages": [{"role": "user", "content": "weather in Łódź"}]}
    with client.messages.stream(tools=[WEATHER], **asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert events.count("content_block_start") == events.count("content_block_stop") == 2
    whole = client.messages.create(tools=[WEATHER], **asked)
    assert (final.content[0].text, final.content[1].name) == ("I look.", "weather")
    assert final.content[1].input == whole.content[1].input == {"city": "Łódź"}
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens > 0


def test_thinking_is_a_block_of_its_own(client: Any) -> None:
    asked: Any = {"model": "main", "max_tokens": 200, "messages": [{"role": "user", "content": "ponder"}]}
    whole = client.messages.create(thinking={"type": "disabled"}, **asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("hm", "yes")


def test_a_conversation_with_tools_reaches_the_template(server: Running, client: Any) -> None:
    messages: Any = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "well", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "say: ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "so"},
            ],
        },
    ]
    counted = client.messages.count_tokens(model="main", messages=messages)
    prompt = "u:hi\na:<think>well</think>I look.<tool_call>Rome</tool_call>\nt:sun\nu:say: so\na:"
    assert counted.input_tokens == len(prompt.encode())
    answer = client.messages.create(model="main", max_tokens=9, messages=messages)
    assert (answer.content[0].text, answer.usage.input_tokens) == ("so", counted.input_tokens)


def test_a_message_of_the_assistant_is_continued(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "say: on and"}]
    assert client.messages.create(model="main", max_tokens=9, messages=messages).content[0].text == "on and"
    assert client.messages.count_tokens(model="main", messages=messages).input_tokens == len("u:hi\na:say: on and")


@pytest.mark.parametrize(
    ("choice", "calls"),
    [({"type": "any"}, 1), ({"type": "tool", "name": "weather"}, 1), ({"type": "none"}, 0), ({"type": "auto"}, 1)],
)
def test_tools_are_chosen(client: Any, choice: Any, calls: int) -> None:
    text = "weather in Łódź"
    answer = ask(client, text, tools=[WEATHER], tool_choice=choice)
    assert sum(block.type == "tool_use" for block in answer.content) == calls
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"model": "other"}, 404, "'other'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]}, 400, "tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "textt": 1}]}]}, 400, "textt"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, 400, "no name"),
        ({"tool_choice": {"type": "any"}}, 400, "no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "'thinking.budget_tokens' is 1024"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"system": [{"type": "text"}]}, 400, "system"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages"),
        (used(input=DEEP), 400, "messages[1].content[0].input is "),
        (used(name=5), 400, "messages[1].content[0].name is 5"),
        (used(id=None), 400, "messages[1].content[0].id is None"),
        ({"messages": [HI, {"role": "assistant", "content": [CALLED] * 513}]}, 400, "a value of messages is "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "content[0].tool_use_id is None"),
    ],
)
def test_refusals_have_anthropics_form(client: Any, asked: Any, status: int, said: str) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(client, "hi", **asked)
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "error" and said in caught.value.body["error"]["message"]
    assert caught.value.body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (408, "timeout_error"), (413, "request_too_large"), (415, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
def test_a_status_has_anthropics_name(status: int, kind: str) -> None:
    told = anthropic_body(ApiError("no.", status=status))
    assert told == {"type": "error", "error": {"type": kind, "message": "no."}}


def test_a_wrong_key_is_refused(server: Running) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0), "hi")
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_client_that_leaves_ends_its_request(server: Running) -> None:
    from serving import until

    server.core.seconds, before = 0.01, len(server.core.aborted)
    body = {"model": "main", "max_tokens": 1500, "stream": True, "messages": [{"role": "user", "content": "x" * 900}]}
    try:
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, headers={"x-api-key": "secret"}) as answer:
            next(answer.iter_lines())
        until(lambda: len(server.core.aborted) > before)
    finally:
        server.core.seconds = 0.0


def test_a_call_that_is_cut_off_is_text(client: Any) -> None:
    answer = ask(client, "half a call", tools=[WEATHER])
    assert [block.type for block in answer.content] == ["text"] and answer.stop_reason == "end_turn"


def test_blocks_open_and_close_in_order() -> None:
    blocks = Blocks()
    first = New("r", [Content("a"), Content(""), Content("b"), CallBegins("f", "1"), Arguments("{"), CallBreaks("{")])
    second = New("", [CallBegins("g", "2"), CallEnds(), Content("c")])
    steps = [*blocks.read(first), *blocks.read(second), *blocks.end()]
    assert [(step.what, step.place, step.text) for step in steps] == [
        ("begins", 0, ""), ("grows", 0, "r"), ("ends", 0, ""),
        ("begins", 1, ""), ("grows", 1, "a"), ("grows", 1, "b"), ("ends", 1, ""),
        ("begins", 2, ""), ("grows", 2, "{"), ("ends", 2, ""),
        ("begins", 3, ""), ("ends", 3, ""),
        ("begins", 4, ""), ("grows", 4, "c"), ("ends", 4, ""),
    ]  # fmt: skip
    assert [(block.kind, block.text) for block in blocks.blocks] == [
        ("reasoning", "r"), ("text", "ab"), ("call", "{"), ("call", ""), ("text", "c"),
    ]  # fmt: skip
