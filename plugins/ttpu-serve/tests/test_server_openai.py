"""What users of OpenAI's API may rely on, by OpenAI's own Python client over a socket. A core without a model answers,
so that every answer is known; `test_server_engine.py` asks a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from fake_core import EOS, FakeCore, tokenizer
from serving import Running, running

from ttpu_serve.api.outputs import Logprob
from ttpu_serve.server import ServerSettings
from ttpu_serve.server.responses import prompt_logprobs

openai = pytest.importorskip("openai")

TOOLS_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}{% for message in messages %}"
    "{{ message['role'][0] }}:{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments['city'] }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    core = FakeCore(
        tokenizer(tmp_path_factory.mktemp("tokenizer"), TOOLS_TEMPLATE),
        max_model_len=2048,
        adapters={"poet": 1},
        replies={
            "both cities": f"Let me look.\n{CALL}\n{CALL}",
            "the weather": CALL,
            "broken call": '<tool_call>{"name": 3}</tool_call> sorry',
            "second try": '<tool_call>{"name": "weather", "arguments": {"city": no}}</tool_call>' + CALL,
        },
    )
    with running(core, ServerSettings(model_names=("main", "alias"), default_sampling={"top_k": 7})) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client()


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered(client: Any) -> None:
    answer = client.chat.completions.create(model="main", messages=user("say: hello wörld"))
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "main"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello wörld", "stop")
    prompt = "u:say: hello wörld\na:"
    assert answer.usage.prompt_tokens == len(prompt.encode())
    assert answer.usage.completion_tokens == len("hello wörld".encode()) + 1, "the end of sequence is a token"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same(client: Any) -> None:
    asked = {"model": "alias", "messages": user("say: hello wörld ✓"), "seed": 1}
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello wörld ✓"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.model for chunk in chunks} == {"alias"}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_counts_tokens_if_asked(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="main", messages=user("say: abc"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_counts_tokens_in_every_chunk_if_asked(client: Any, kind: str) -> None:
    counts = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {"model": "main", "stream": True, "stream_options": counts, "max_tokens": 5}
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=user("say: abc"), **asked))
    else:
        chunks = list(client.completions.create(prompt="say: abc", **asked))
    told = [chunk.usage.completion_tokens for chunk in chunks]
    assert told == sorted(told) and told[0] <= told[-1] == 4  # a server joins deltas of a slow reader
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    asked["stream_options"] = {"continuous_usage_stats": True}  # means nothing by itself, as for vLLM
    given = {"messages": user("say: abc")} if kind == "chat" else {"prompt": "say: abc"}
    api = client.chat.completions if kind == "chat" else client.completions
    assert all(chunk.usage is None for chunk in api.create(**given, **asked))


def test_a_whole_text_says_why_it_ended(client: Any) -> None:
    for tokens, reason in ((3, "length"), (20, "stop")):
        (choice,) = client.completions.create(model="main", prompt="say: abcdef", max_tokens=tokens).choices
        assert (choice.text, choice.finish_reason) == ("abcdef"[:tokens], reason)


def test_chunks_of_texts_have_no_usage_unless_it_is_asked_for(server: Running) -> None:
    for options, present in ((None, False), ({"include_usage": True}, True)):
        asked = {"model": "main", "prompt": "say: abc", "stream": True, "stream_options": options}
        lines = server.http().post("/v1/completions", json=asked).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks and all(("usage" in chunk) == present for chunk in chunks)
        asked = {"model": "main", "messages": user("say: abc"), "stream": True, "stream_options": options}
        lines = server.http().post("/v1/chat/completions", json=asked).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks and all(("usage" in chunk) == present for chunk in chunks)
        assert not any("prompt_logprobs" in chunk for chunk in chunks)


def test_only_the_log_probabilities_that_are_asked_for_are_computed(server: Running, client: Any) -> None:
    none: Any = {"logprobs": False, "top_logprobs": 0}  # as vLLM's clients write it out
    for asked, count in (({}, None), (none, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)):
        client.chat.completions.create(model="main", messages=user("say: a"), **asked)
        assert server.core.seen[-1].logprobs == count, asked


@pytest.fixture
def backwards(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step tells of the last sequence first."""
    step = server.core.step
    monkeypatch.setattr(server.core, "step", lambda: step()[::-1])


def test_several_answers_come_each_with_its_index(client: Any) -> None:
    answer = client.chat.completions.create(model="main", messages=user("say: abc"), n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "abc"), (1, "abc"), (2, "abc")]
    assert answer.usage.completion_tokens == 12, "usage counts all answers, and the prompt once"
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="main", messages=user("say: abc"), n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "abc", 1: "abc"}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_that_reaches_its_limit_says_length(client: Any, name: str) -> None:
    answer = client.chat.completions.create(model="main", messages=user("say: abcdef"), **{name: 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")


def test_stop_texts_end_the_answer_and_are_not_in_it(client: Any) -> None:
    for stop in ("de", ["zz", "de"]):
        answer = client.chat.completions.create(model="main", messages=user("say: abcdef"), stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "stop")
    streamed = client.chat.completions.create(model="main", messages=user("say: abcdef"), stop="de", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "abc"


def test_log_probabilities_of_a_chat(client: Any) -> None:
    asked = {"model": "main", "messages": user("say: é!"), "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [ord("!")], [*b"</s>"]], "as in vLLM, with the end"
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == "é!"
    assert [(top.token, top.logprob) for top in content[2].top_logprobs] == [("!", -0.5), ('"', -1.5)]
    chunks = client.chat.completions.create(stream=True, **asked)
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry.bytes for piece in pieces for entry in piece] == [entry.bytes for entry in content]


def test_minus_infinity_is_a_number_that_json_has(client: Any) -> None:
    answer = client.chat.completions.create(model="main", messages=user("say: a"), logprobs=True, top_logprobs=5)
    assert answer.choices[0].logprobs.content[0].top_logprobs[-1].logprob == -9999.0


def test_what_a_request_says_reaches_the_engine(server: Running, client: Any) -> None:
    client.chat.completions.create(
        model="main",
        messages=user("say: a"),
        temperature=0.5,
        top_p=0,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"65": -100},
        user="me",
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [9]},
    )
    params = server.core.seen[-1]
    assert (params.temperature, params.top_k, params.min_p, params.min_tokens) == (0.5, 3, 0.1, 1)
    assert 0 < params.top_p < 1e-3, "0 leaves the likeliest token"
    assert params.seed == 2**32 - 1 and params.logit_bias == {65: -100} and params.stop_token_ids == (9,)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert params.max_tokens is None, "a chat goes on as long as the context"


def test_defaults_are_openais_then_the_servers(server: Running, client: Any) -> None:
    client.chat.completions.create(model="main", messages=user("say: a"))
    params = server.core.seen[-1]
    assert (params.temperature, params.top_p, params.top_k, params.n, params.seed) == (1.0, 1.0, 7, 1, None)
    client.completions.create(model="main", prompt="say: a")
    assert server.core.seen[-1].max_tokens == 16


def test_content_may_come_in_parts(client: Any) -> None:
    parts: Any = [{"type": "text", "text": "say: "}, {"type": "text", "text": "joined"}]
    messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert client.chat.completions.create(model="main", messages=messages).choices[0].message.content == "joined"


def test_the_last_message_can_be_continued(server: Running, client: Any) -> None:
    messages: Any = [*user("say: x"), {"role": "assistant", "content": "The answer"}]
    told = server.http().post(
        "/tokenize", json={"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    )
    assert bytes(told.json()["tokens"]).decode().endswith("a:The answer")


# -- tools ---------------------------------------------------------------------------------------------------------


def test_a_tool_call_is_told_from_text(client: Any) -> None:
    answer = client.chat.completions.create(model="main", messages=user("the weather?"), tools=[WEATHER])
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Łódź"}


def test_tool_calls_are_streamed_with_places_ids_and_arguments(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(model="main", messages=user("both cities"), tools=[WEATHER], stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert text.strip() == "Let me look."
    begun = [call for call in calls if call.id is not None]
    assert [call.index for call in begun] == [0, 1] and begun[0].id != begun[1].id
    assert all((call.type, call.function.name) == ("function", "weather") for call in begun)
    for place in (0, 1):
        pieces = [call.function.arguments for call in calls if call.index == place]
        assert json.loads("".join(pieces)) == {"city": "Łódź"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_streamed_as_calls(client: Any, choice: Any) -> None:
    asked: Any = {"model": "main", "messages": user("hi"), "tools": [WEATHER], "tool_choice": choice, "stream": True}
    chunks = list(client.chat.completions.create(**asked))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather" and {call.index for call in calls} == {0}
    pieces = [call.function.arguments for call in calls]
    assert json.loads("".join(pieces)) == {"city": "x"}
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_call_that_is_cut_off_is_content(client: Any, tool_choice: Any) -> None:
    """A stream has begun to tell it by then, as OpenAI's do."""
    asked: Any = {"model": "main", "messages": user("the weather?"), "tools": [WEATHER], "tool_choice": tool_choice}
    choice = client.chat.completions.create(max_tokens=42, **asked).choices[0]
    told = choice.message.content
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert len(told) == 42 and told.startswith((CALL[:42], '[{"name": "weather"'))
    chunks = list(client.chat.completions.create(max_tokens=42, stream=True, **asked))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_parallel_calls_can_be_ruled_out(client: Any) -> None:
    asked: Any = {"model": "main", "messages": user("both cities"), "tools": [WEATHER], "parallel_tool_calls": False}
    choice = client.chat.completions.create(**asked).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    chunks = list(client.chat.completions.create(stream=True, **asked))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0}
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Łódź"}


def test_a_call_that_breaks_is_not_the_one_that_may_be_reported(client: Any) -> None:
    asked: Any = {"model": "main", "messages": user("second try"), "tools": [WEATHER], "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Łódź"}
    chunks = list(client.chat.completions.create(stream=True, **asked))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    told = ["".join(call.function.arguments or "" for call in calls if call.index == index) for index in (0, 1)]
    assert {call.index for call in calls} == {0, 1} and told[0].startswith('{"city": ') and "Łódź" not in told[0]
    assert json.loads(told[1]) == {"city": "Łódź"}, "a stream has begun to tell of the first one by then"


def test_the_clients_own_accumulator_understands_the_stream(client: Any) -> None:
    with client.chat.completions.stream(model="main", messages=user("both cities"), tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["weather", "weather"]


def test_what_is_no_call_stays_text(client: Any) -> None:
    answer = client.chat.completions.create(model="main", messages=user("broken call"), tools=[WEATHER])
    assert answer.choices[0].message.content == '<tool_call>{"name": 3}</tool_call> sorry'
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"


def test_without_tools_nothing_is_a_call(client: Any) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}):
        answer = client.chat.completions.create(model="main", messages=user("the weather?"), **more)
        assert answer.choices[0].message.content == CALL and answer.choices[0].message.tool_calls is None


def test_a_tool_can_be_required(server: Running, client: Any) -> None:
    asked = {"model": "main", "messages": user("hi"), "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "x"}
    schema = server.core.seen[-1].guided.json
    assert schema["type"] == "array" and schema["minItems"] == 1 and len(schema["items"]["anyOf"]) == 2
    client.chat.completions.create(parallel_tool_calls=False, **asked)
    assert server.core.seen[-1].guided.json["maxItems"] == 1


def test_a_tool_can_be_chosen_by_name(client: Any) -> None:
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "main", "messages": user("hi"), "tools": [WEATHER, CLOCK], "tool_choice": chosen}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "x"})
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (final.function.name, json.loads(final.function.arguments)) == ("weather", {"city": "x"})


def test_calls_and_their_results_go_back_into_the_template(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *user("?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    told = server.http().post("/tokenize", json={"messages": messages, "tools": [WEATHER]}).json()
    text = bytes(told["tokens"]).decode()
    assert "<tool_call>Oslo</tool_call>" in text and "t:rain" in text and text.startswith("tools: [")


# -- the answer's form ------------------------------------------------------------------------------------------------


def test_response_formats_guide_the_answer(server: Running, client: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    forms: list[tuple[Any, Any]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}, schema),
    ]
    for form, expected in forms:
        answer = client.chat.completions.create(model="main", messages=user("say: hi"), response_format=form)
        guided = server.core.seen[-1].guided
        assert (guided.json if guided else None) == expected
        if expected is not None:
            assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"guided_choice": ["yes", "no"]}, "choice", ("yes", "no")),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"guided_json": {"type": "object"}}, "json", {"type": "object"}),
        ({"structured_outputs": {"choice": ["yes"]}}, "choice", ("yes",)),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json", {"type": "object"}),
    ],
)
def test_vllms_ways_to_guide_are_understood(server: Running, client: Any, extra: Any, field: str, value: Any) -> None:
    client.chat.completions.create(model="main", messages=user("say: hi"), extra_body=extra)
    assert getattr(server.core.seen[-1].guided, field) == value


# -- completions ------------------------------------------------------------------------------------------------------


def test_plain_completions_take_texts_and_ids(client: Any) -> None:
    ids = list(b"say: ab")
    for prompt, count in (("say: ab", 1), (["say: ab", "say: ab"], 2), (ids, 1), ([ids, ids], 2)):
        answer = client.completions.create(model="main", prompt=prompt)
        assert [choice.text for choice in answer.choices] == ["ab"] * count
        assert answer.usage.prompt_tokens == len(ids) * count


def test_answers_are_numbered_by_prompt_then_by_answer(client: Any) -> None:
    answer = client.completions.create(model="main", prompt=["say: a", "say: b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    texts = [""] * 4
    for chunk in client.completions.create(model="main", prompt=["say: a", "say: b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a", "a", "b", "b"]


def test_log_probabilities_and_offsets_of_an_echoed_prompt(client: Any) -> None:
    answer = client.completions.create(model="main", prompt="say: hé", echo=True, logprobs=1)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text == "say: héhé"
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None, "nothing precedes the first token"
    assert len(logprobs.tokens) == len("say: héhé".encode()) + 1 and logprobs.tokens[-1] == "</s>"
    assert logprobs.token_logprobs[1:] == [-0.5] * 11
    # A character of two tokens begins where both do; the answer begins where the prompt's text ends.
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 8, 9]


def test_a_prompt_is_scored_as_lm_eval_asks_though_its_answer_is_empty(client: Any) -> None:
    """lm-eval reads what lies between its context and the last token, which is generated."""
    asked: Any = {"model": "main", "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    for prompt, text, reason in (("say: ", "", "stop"), ("say: a", "a", "length")):
        (choice,) = client.completions.create(prompt=prompt, **asked).choices
        assert (choice.text, choice.finish_reason) == (prompt + text, reason)
        assert choice.logprobs.tokens[:-1] == [*prompt] and choice.logprobs.token_logprobs[1:] == [-0.5] * len(prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("backwards")
def test_each_choice_of_an_echo_has_the_prompts_log_probabilities(client: Any, stream: bool) -> None:
    asked: Any = {"model": "main", "echo": True, "logprobs": 1, "prompt": ["say: é", "say: ab"]}
    extra: Any = {"prompt_logprobs": 0}
    alone = [client.completions.create(**asked | {"prompt": prompt}).choices[0] for prompt in asked["prompt"]]
    found = client.completions.create(n=2, stream=stream, extra_body=extra, **asked)
    choices = [choice for chunk in found for choice in chunk.choices] if stream else found.choices
    for index, one in enumerate(one for one in alone for _ in range(2)):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own) == one.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [value for choice in own if choice.logprobs for value in getattr(choice.logprobs, name)]
            assert told == getattr(one.logprobs, name)
        (of_prompt,) = [choice.prompt_logprobs for choice in own if hasattr(choice, "prompt_logprobs")]
        assert len(of_prompt) == len(asked["prompt"][index // 2].encode())


def test_offsets_count_special_tokens_only_where_the_text_has_them(client: Any) -> None:
    asked: Any = {"model": "main", "echo": True, "logprobs": 0, "max_tokens": 1}
    ids = [256, *b"ab"]
    echoed = client.completions.create(prompt=ids, **asked).choices[0]
    assert echoed.text.startswith("<s>ab") and echoed.logprobs.text_offset[:4] == [0, 3, 4, 5]
    written = client.completions.create(prompt="ab", **asked).choices[0]
    assert written.logprobs.text_offset[-1] == 2


def test_bytes_that_are_no_character_are_counted_before_the_token_after_them(client: Any) -> None:
    ids = [*b"a\xc3b\xe2\x82c", *"é".encode(), *b"d"]
    asked: Any = {"model": "main", "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    echoed = client.completions.create(**asked).choices[0]
    assert echoed.text == "a\ufffdb\ufffdcéd"
    # Bytes of one character, whole or not, begin where it does.
    assert echoed.logprobs.text_offset == [0, 1, 2, 3, 3, 4, 5, 5, 6]


def test_a_prompt_alone_can_be_scored(client: Any) -> None:
    answer = client.completions.create(model="main", prompt="say: h", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "say: h" and len(answer.choices[0].logprobs.tokens) == 6
    assert answer.usage.completion_tokens == 0


def test_prompt_log_probabilities_as_vllm_has_them(client: Any) -> None:
    answer = client.completions.create(model="main", prompt="say: h", extra_body={"prompt_logprobs": 0})
    told = answer.choices[0].prompt_logprobs
    assert told[0] is None and told[1] == {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    asked: Any = {"echo": True, "logprobs": 4, "extra_body": {"prompt_logprobs": 2}}
    choice = client.completions.create(model="main", prompt="say: h", **asked).choices[0]
    assert [*choice.prompt_logprobs[1]] == ["97", "98"], "not those that echo asks the engine for"
    assert len(choice.logprobs.top_logprobs[1]) == 4


def test_prompt_log_probabilities_keep_the_prompts_own_token() -> None:
    class Names:
        def text_of(self, token: int) -> str:
            return str(token)

    told = {9: Logprob(-7.0, 40), 4: Logprob(-0.5, 1), 5: Logprob(-1.0, 2)}
    names: Any = Names()
    for count, kept in ((0, ["9"]), (1, ["9", "4"]), (2, ["9", "4", "5"])):
        found = prompt_logprobs([None, told], count, names)
        assert found is not None and found[0] is None and [*(found[1] or ())] == kept
    assert prompt_logprobs(None, 1, names) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("backwards")
def test_a_chat_of_several_replies_has_the_prompts_log_probabilities(client: Any, stream: bool) -> None:
    asked: Any = {"model": "main", "messages": user("say: ab"), "n": 2, "extra_body": {"prompt_logprobs": 0}}
    found = client.chat.completions.create(stream=stream, **asked)
    (told,) = [chunk.prompt_logprobs for chunk in (found if stream else [found]) if hasattr(chunk, "prompt_logprobs")]
    assert len(told) == len("u:say: ab\na:")


def test_token_ids_come_if_asked(client: Any) -> None:
    asked: Any = {"model": "main", "extra_body": {"return_token_ids": True}}
    said = [*"hé".encode(), EOS]
    whole = client.chat.completions.create(messages=user("say: hé"), **asked)
    assert whole.choices[0].token_ids == said and whole.prompt_token_ids == [*"u:say: hé\na:".encode()]
    chunks = list(client.chat.completions.create(messages=user("say: hé"), stream=True, **asked))
    assert [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])] == said
    told = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks]
    assert told[0] == whole.prompt_token_ids and not any(told[1:])
    prompts = ["say: hé", "say: hé!"]
    choices = client.completions.create(prompt=prompts, **asked).choices
    assert [choice.token_ids for choice in choices] == [said, [*"hé!".encode(), EOS]]
    assert [choice.prompt_token_ids for choice in choices] == [[*prompt.encode()] for prompt in prompts]
    chunks = list(client.completions.create(prompt="say: hé", stream=True, **asked))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == said
    told = [getattr(chunk.choices[0], "prompt_token_ids", None) for chunk in chunks]
    assert told[0] == [*prompts[0].encode()] and not any(told[1:])


def test_a_stream_says_what_a_whole_answer_says(client: Any) -> None:
    extra: Any = {"extra_body": {"prompt_logprobs": 0}}
    asked: Any = {"model": "main", "messages": user("say: hello"), "stop": "l", **extra}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    told = [chunk.prompt_logprobs for chunk in chunks if hasattr(chunk, "prompt_logprobs")]
    assert told == [whole.prompt_logprobs] and len(told[0]) == whole.usage.prompt_tokens
    assert chunks[-1].choices[0].stop_reason == whole.choices[0].stop_reason == "l"
    chunks = list(client.completions.create(model="main", prompt="say: é", stream=True, **extra))
    assert len(chunks[0].choices[0].prompt_logprobs) == len("say: é".encode()), "though half a character is no text"


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_embeddings_come_as_floats_and_as_base64(server: Running, client: Any) -> None:
    told = client.embeddings.create(model="main", input=["a", "bc"])  # the client asks for base64 and decodes it
    floats = client.embeddings.create(model="main", input=["a", [98, 99]], encoding_format="float")
    assert [one.index for one in told.data] == [0, 1]
    for one, other in zip(told.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value**2 for value in one.embedding) == pytest.approx(1)
    assert told.usage.prompt_tokens == told.usage.total_tokens == 3


def test_models_are_listed_with_their_adapters(client: Any) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["main", "alias", "poet"] and cards["poet"].parent == "main"
    assert client.models.retrieve("alias").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/nothing")


def test_adapters_answer_under_their_names(client: Any) -> None:
    assert client.completions.create(model="poet", prompt="say: a").model == "poet"
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="painter", prompt="say: a")
    assert refusal.value.code == "model_not_found" and "poet" in refusal.value.message


def test_texts_become_tokens_and_back(server: Running) -> None:
    http = server.http()
    told = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert told["tokens"] == list("hé".encode()) and told["count"] == 3 and told["max_model_len"] == 2048
    assert len(told["token_strs"]) == 3
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "hé"}
    chat = http.post("/tokenize", json={"messages": user("hi")}).json()
    assert bytes(chat["tokens"]).decode() == "u:hi\na:"


def test_requests_have_ids(server: Running) -> None:
    http = server.http()
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_a_model_without_a_chat_template_serves_completions_alone(tmp_path: Any) -> None:
    with running(FakeCore(tokenizer(tmp_path, None))) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            server.client().chat.completions.create(model="fake", messages=user("hi"))
        assert server.client().completions.create(model="fake", prompt="say: a").choices[0].text == "a"
    template = tiny.CHAT_TEMPLATE.replace("a:", "bot:")
    with running(FakeCore(tokenizer(tmp_path, None)), ServerSettings(chat_template=template)) as server:
        told = server.http().post("/tokenize", json={"messages": user("hi")}).json()
        assert bytes(told["tokens"]).decode() == "u:hi\nbot:"
