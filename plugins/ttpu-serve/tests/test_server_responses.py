"""/v1/responses, asked by OpenAI's own client over a socket; a core without a model answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_core import FakeCore, tokenizer
from serving import Running, running, until

from ttpu_core.errors import RequestError, TTPUError
from ttpu_serve.server import ServerSettings
from ttpu_serve.server.errors import ApiError, as_api_error, fields_named
from ttpu_serve.server.openai_responses import OneResponse
from ttpu_serve.server.openai_responses_protocol import as_messages
from ttpu_serve.server.response_store import ResponseStore
from ttpu_serve.server.turn import Turn

openai = pytest.importorskip("openai")

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}{% for message in messages %}"
    "{{ message['role'][0] }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments['city'] }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": PARAMETERS}


HI: Any = {"role": "user", "content": "hi"}
CALLED: Any = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
DEEP = "[" * 200 + "]" * 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replies = {"ponder": "<think>hm</think>yes", "weather in Łódź": f"<think>so</think>I look.{CALL}{CALL}"}
    core = FakeCore(tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE), max_model_len=2048, replies=replies)
    settings = ServerSettings(model_names=("main",), api_keys=("secret", "other"), reasoning_parser="think")
    with running(core, settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client("secret")


def test_an_input_is_answered(client: Any) -> None:
    asked: Any = {"instructions": "Be kind.", "temperature": 0, "metadata": {"for": "tests"}}
    answer = client.responses.create(model="main", input="say: hello wörld", **asked)
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.output_text == "hello wörld" and answer.metadata == {"for": "tests"}
    prompt = "s:Be kind.\nu:say: hello wörld\na:"
    assert answer.usage.input_tokens == len(prompt.encode())
    assert answer.usage.output_tokens == len("hello wörld".encode()) + 1
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert client.responses.retrieve(answer.id).output_text == "hello wörld"


def test_a_response_continues_another(client: Any) -> None:
    first = client.responses.create(model="main", input="say: one", instructions="Kind.")
    second = client.responses.create(model="main", input="say: two", previous_response_id=first.id)
    third = client.responses.create(model="main", input="say: three", previous_response_id=second.id)
    assert third.output_text == "three" and third.previous_response_id == second.id
    prompt = "u:say: one\na:one\nu:say: two\na:two\nu:say: three\na:"
    assert third.usage.input_tokens == len(prompt), "instructions are not carried over"


def test_what_is_not_stored_cannot_be_continued(server: Running, client: Any) -> None:
    unstored = client.responses.create(model="main", input="say: one", store=False)
    deleted = client.responses.create(model="main", input="say: one")
    client.responses.delete(deleted.id)
    others = server.client("other").responses.create(model="main", input="say: one")
    for name in (unstored.id, deleted.id, others.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="main", input="say: two", previous_response_id=name)
        assert caught.value.param == "previous_response_id"
    assert server.client("other").responses.retrieve(others.id).output_text == "one"
    for key, status in (("secret", 404), ("other", 200)):  # as Anthropic's clients send it
        assert server.http(headers={"x-api-key": key}).get(f"/v1/responses/{others.id}").status_code == status


def test_a_stream_tells_all_events_in_order(client: Any) -> None:
    asked: Any = {"model": "main", "input": "weather in Łódź", "tools": [WEATHER]}
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = ("output_item.added", *(f"function_call_arguments.{what}" for what in ("delta", "done")), "output_item.done")
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    assert {event.content_index for event in events if "content_index" in type(event).model_fields} == {0}
    final = events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    whole = client.responses.create(**asked)
    assert whole.output_text == final.output_text == "I look."
    for counted in (whole.usage, final.usage):
        assert (counted.input_tokens, counted.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
        assert 0 < counted.output_tokens_details.reasoning_tokens < counted.output_tokens
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    assert json.loads(whole.output[2].arguments) == json.loads(final.output[2].arguments) == {"city": "Łódź"}
    assert client.responses.retrieve(final.id).output_text == "I look."


def test_the_results_of_calls_are_read(client: Any) -> None:
    asked = client.responses.create(model="main", input="weather in Łódź", tools=[WEATHER])
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "say: sun"}
        for item in asked.output
        if item.type == "function_call"
    ]
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "say: fine"}]}
    answer = client.responses.create(model="main", previous_response_id=asked.id, input=[*outputs, user])
    turn = "a:<think>so</think>I look.<tool_call>Łódź</tool_call><tool_call>Łódź</tool_call>\n"
    prompt = f"u:weather in Łódź\n{turn}t:say: sun\nt:say: sun\nu:say: fine\na:"
    assert answer.usage.input_tokens == len(prompt.encode())


def test_a_form_is_kept(client: Any, server: Running) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}}
    assert json.loads(client.responses.create(model="main", input="x", text=form).output_text) == {"city": "x"}
    called = client.responses.create(
        model="main", input="x", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}
    )
    assert [item.type for item in called.output] == ["function_call"] and called.tool_choice.name == "weather"
    assert server.core.seen[-1].guided.prelude is not None, "reasoning may come before"


def test_markers_that_are_special_tokens_are_kept_unless_the_client_says(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = server.server.config.app.state.service.tokens
    http = server.http(headers={"x-api-key": "secret"})
    for special, asked, skipped in ((False, None, True), (True, None, False), (True, True, True)):
        monkeypatch.setattr(tokens, "is_special", lambda text, special=special: special)
        body = {"model": "main", "messages": [{"role": "user", "content": "hi"}], "skip_special_tokens": asked}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert server.core.seen[-1].skip_special_tokens is skipped, (special, asked)


def test_a_response_that_is_cut_off_is_incomplete(client: Any) -> None:
    answer = client.responses.create(model="main", input="say: one two", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == (
        "incomplete", "max_output_tokens", "one"
    )  # fmt: skip
    *_, last = client.responses.create(model="main", input="say: one two", max_output_tokens=3, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}], "instructions": "x"}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [HI, {**CALLED, "arguments": DEEP}], "instructions": "x"}, "input[1].arguments"),
        ({"input": [HI, *[CALLED] * 513]}, "input"),
        ({"input": []}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": "x" * 3000}, "input"),
    ],
)
def test_what_is_not_served_is_refused(client: Any, asked: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "main", "input": "hi", **asked})
    assert caught.value.param == param and param in caught.value.message


def test_places_are_those_of_the_request_alone(client: Any) -> None:
    """And not of the conversation that it continues."""
    before = client.responses.create(model="main", input="say: hello").id
    for item, param in (({**CALLED, "arguments": DEEP}, "input[1].arguments"), ({"role": "wizard"}, "input[1].role")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="main", input=[HI, item], previous_response_id=before)
        assert caught.value.param == param and caught.value.message.count(param) == 1
    with pytest.raises(ApiError, match="previous_response_id names a response that called") as told:
        as_messages([HI], [HI, {**CALLED, "arguments": DEEP}])
    assert told.value.body["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("error", "param", "said"),
    [
        (ApiError("the chat template refuses these messages (E: 'messages').", param="messages"), "input", None),
        (ApiError("messages has 9 letters.", param="messages"), "input", "input has 9 letters."),
        (ApiError("the field 'messages' is 2.", param="messages"), "input", "the field 'input' is 2."),
        (ApiError("messages_of is 2.", param="messages"), "input", None),
        (RequestError("messages holds 2.", param="messages"), "input", "input holds 2."),
        (ApiError("messages is 2.", param="tools"), "tools", None),
    ],
)
def test_fields_are_renamed_where_they_are_named(error: TTPUError, param: str, said: str | None) -> None:
    with pytest.raises(TTPUError) as caught, fields_named({"messages": "input"}):
        raise error
    told = as_api_error(caught.value)
    assert told.body["error"]["param"] == param
    assert told.body["error"]["message"] == str(told) == (said or str(error))
    assert caught.value.__cause__ is (None if param == "tools" else error)


def test_a_client_that_leaves_ends_its_request(server: Running, client: Any) -> None:
    server.core.seconds, before = 0.01, len(server.core.aborted)
    try:
        with client.responses.create(model="main", input="x" * 900, stream=True) as stream:
            next(iter(stream))
        until(lambda: len(server.core.aborted) > before)
    finally:
        server.core.seconds = 0.0


def test_the_store_is_bounded() -> None:
    store = ResponseStore(most=2, most_bytes=10_000)
    for name in "abc":
        store.put({"id": name}, [{"n": name}], "me")
        if name == "b":
            store.get("a", "me")  # was used last
    assert json.loads(store.get("a", "me").items) == [{"n": "a"}]
    for name, owner in (("b", "me"), ("c", "you")):
        with pytest.raises(ApiError):
            store.get(name, owner)
    store.put({"id": "large"}, ["x" * 4000], "me")
    with pytest.raises(ApiError):
        store.get("a", "me")
    store.put({"id": "huge"}, ["x" * 5000], "me")
    store.get("large", "me")
    store.delete("large", "me")
    assert store._bytes == 0


@pytest.mark.parametrize(
    ("pieces", "thought"),
    [
        ([("so it is", "", 4), ("", "", 1), ("", "fine", 2)], 5),  # the second token ends the reasoning
        ([("so it is", "", 4), (" so", "I look", 6)], 6),  # a third of the letters
        ([("so", "I look at it all", 9)], 1),
        ([("", "fine", 3)], 0),
    ],
)
def test_reasoning_is_counted_by_its_share_of_a_piece(pieces: list[tuple[str, str, int]], thought: int) -> None:
    told, turn = object.__new__(OneResponse), Turn()
    told._thought, told._thought_letters, told._thinks = 0, 0, True
    for reasoning, text, tokens in [*pieces, ("", "more", 5)]:
        turn.reasoning += reasoning
        turn.text += text
        turn.ids += range(tokens)
        told._count(turn)
    assert told._thought == thought
