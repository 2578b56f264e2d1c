"""Every refusal is JSON in OpenAI's form, with a status of its kind and the field that it is about."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_core import FakeCore, tokenizer
from pydantic import ValidationError
from serving import Running, running

from ttpu_core.errors import RequestError
from ttpu_serve.server import ServerSettings
from ttpu_serve.server.chat_protocol import ChatRequest
from ttpu_serve.server.errors import as_api_error
from ttpu_serve.server.protocol import Body, CompletionRequest
from ttpu_serve.server.tokens import PREFIX, SLACK

openai = pytest.importorskip("openai")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "say: hello"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    core = FakeCore(tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with running(core, ServerSettings(max_body_bytes=10_000, max_prompt_tokens=200, max_choices=8)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def strict_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    core = FakeCore(tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with running(core, ServerSettings(strict_fields=True)) as server, server.http() as client:
        yield client


def refused(response: httpx.Response, status: int) -> Any:
    """The error of a response that must have this status and OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith(".") and "\n" not in body["error"]["message"]
    return body["error"]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": HELLO, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "say: hello", **fields}


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """With whatever Python's JSON can write, such as NaN and halves of surrogate pairs."""
    return http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": [CALL]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ],
)
def test_a_chat_that_cannot_be_served_names_its_field(http: httpx.Client, fields: Any, param: str) -> None:
    error = refused(post(http, CHAT, chat(**fields)), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "x" * 201}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "stream": True}, "best_of"),
    ],
)
def test_a_completion_that_cannot_be_served_names_its_field(http: httpx.Client, fields: Any, param: str) -> None:
    assert refused(post(http, COMPLETION, completion(**fields)), 400)["param"] == param


CHANGING: dict[str, Any] = {
    "audio": True,
    "functions": True,
    "web_search_options": True,
    "logits_processors": ["a"],
    "structural_tag": "x",
    "max_new_tokens": 3,
    "temprature": 0.1,
    "topP": 0.5,
    "max_token": 3,
}


@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, strict_http: httpx.Client, strict: bool
) -> None:
    for name, value in CHANGING.items():
        error = refused((strict_http if strict else http).post(CHAT, json=chat(**{name: value})), 400)
        assert error["param"] == name and repr(name) in error["message"]
        similar = name in ("temprature", "topP", "max_token")
        assert error["code"] == ("unknown_field" if similar else "unsupported_field")
        if similar and not strict:
            known = {"temprature": "temperature", "topP": "top_p", "max_token": "max_tokens"}[name]
            assert repr(known) in error["message"]


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"made_up": {"a": 1}}, "made_up"),
    ({"request_id": "a"}, "request_id"),
    ({"a\r\nb: c": 1}, "a%0D%0Ab%3A%20c"),
    ({"ö": 1}, "%C3%B6"),
    ({"made_up": 1, "": 1}, "made_up, ''"),
    ({"a\x7f ": 1}, "a%7F%20"),
    ({"stream": True, "stream_options": {"made_up": 1}}, "stream_options.made_up"),
    ({"messages": [{"role": "user", "content": "say: hello", "cache_control": {}}] * 2}, "messages.cache_control"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "say: hello", "made_up": 1}]}]},
        "messages.content.made_up",
    ),
    ({"response_format": {"type": "text", "made_up": 1}}, "response_format.made_up"),
    ({"store": True, "made_up": 1}, "store, made_up"),
    ({"made_up": 1, "response_format": {"type": "text", "made_up": 1}}, "made_up, response_format.made_up"),
]


@pytest.mark.parametrize(("fields", "told"), UNKNOWN, ids=[told for _, told in UNKNOWN])
def test_what_changes_no_answer_is_ignored_and_named_in_a_header(
    http: httpx.Client, strict_http: httpx.Client, fields: Any, told: str
) -> None:
    response = http.post(CHAT, json=chat(**fields))
    assert response.status_code == 200 and "hello" in "".join(filter(None, spoken(response)))
    assert response.headers["x-ttpu-warning"] == f"fields without effect on this server were ignored: {told}"
    refused(strict_http.post(CHAT, json=chat(**fields)), 400)


def test_a_strict_server_says_why_it_refuses_what_it_knows(strict_http: httpx.Client) -> None:
    error = refused(strict_http.post(CHAT, json=chat(store=True)), 400)
    assert error["code"] == "unsupported_field" and "stores no responses" in error["message"]


def spoken(response: httpx.Response) -> list[Any]:
    """The content of a chat's response, whole or streamed."""
    if response.headers["content-type"] == "application/json":
        return [response.json()["choices"][0]["message"]["content"]]
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice["delta"].get("content") for event in events for choice in json.loads(event)["choices"]]


def test_a_request_has_few_unknown_fields(http: httpx.Client) -> None:
    names = {f"unknown number {number}": 1 for number in range(65)}
    assert http.post(CHAT, json=chat(**dict(list(names.items())[:64]))).headers["x-ttpu-warning"].endswith("56 more")
    assert refused(http.post(CHAT, json=chat(**names)), 400)["code"] == "unknown_field"


def test_fields_that_are_known_give_no_warning(http: httpx.Client) -> None:
    assert "x-ttpu-warning" not in http.post(CHAT, json=chat(user="me", made_up=None)).headers


def test_a_strict_server_documents_that_it_takes_no_other_fields(
    http: httpx.Client, strict_http: httpx.Client
) -> None:
    for client, strict in ((http, False), (strict_http, True)):
        schema = client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]
        assert (schema.get("additionalProperties") is False) == strict


def test_what_means_nothing_is_accepted(http: httpx.Client, strict_http: httpx.Client) -> None:
    neutral = {"store": False, "service_tier": "auto", "modalities": ["text"], "functions": None, "user": "me"}
    neutral |= {"metadata": {"a": "b"}, "n": None, "stop": None, "temperature": None, "logit_bias": None, "tools": []}
    neutral |= {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True}
    for client in (http, strict_http):
        assert client.post(CHAT, json=chat(**neutral)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages[0].refusal"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {" 1_0 ": 1}}, "logit_bias"),
    ],
)
def test_nothing_inside_a_field_is_dropped_in_silence(http: httpx.Client, fields: Any, param: str) -> None:
    assert refused(post(http, CHAT, chat(**fields)), 400)["param"] == param


def test_a_field_given_twice_is_refused(http: httpx.Client) -> None:
    for body in ('{"model": "fake", "prompt": "a", "prompt": "b"}', '{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}'):
        response = http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
        assert "twice" in refused(response, 400)["message"]


def test_an_earlier_answer_may_have_said_nothing(http: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}, *HELLO]
    assert http.post(CHAT, json=chat(messages=messages)).status_code == 200


def test_health_can_be_asked_for_without_a_body(http: httpx.Client) -> None:
    response = http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_a_prompt_that_is_too_long_has_openais_code(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETION, json=completion(prompt="x" * 300)), 400)
    assert error["code"] == "context_length_exceeded" and "200" in error["message"]


def test_a_field_that_is_missing_is_named(http: httpx.Client) -> None:
    assert refused(http.post(CHAT, json={"model": "fake"}), 400)["param"] == "messages"
    assert refused(http.post(COMPLETION, json={"model": "fake"}), 400)["param"] == "prompt"
    assert refused(http.post(COMPLETION), 400)["code"] == "missing_field"


def test_the_model_is_the_servers_where_none_is_named(http: httpx.Client) -> None:
    """As in vLLM."""
    for more in ({}, {"model": None}):
        for path, asked in ((COMPLETION, completion()), (CHAT, chat()), ("/v1/embeddings", {"input": "x"})):
            asked.pop("model", None)
            answer = http.post(path, json=asked | more)
            assert answer.status_code == 200 and answer.json()["model"] == "fake", path


def test_a_list_that_is_too_short_is_told_plainly(http: httpx.Client) -> None:
    said = refused(http.post(CHAT, json=chat(messages=[])), 400)["message"]
    assert said == "messages is []: list should have at least 1 item."


@pytest.mark.parametrize("body", ["{", "", "nul", "[1]", '"text"', "3", "[" * 5000, '{"a": ' * 1600, "\xff\xfe"])
def test_a_body_that_is_no_json_object(http: httpx.Client, body: str) -> None:
    content = body.encode("latin-1")
    refused(http.post(CHAT, content=content, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_another_content_type(http: httpx.Client, kind: str) -> None:
    body = json.dumps(chat()).encode()
    error = refused(http.post(CHAT, content=body, headers={"content-type": kind}), 415)
    assert error["code"] == "unsupported_media_type"


def test_json_by_any_of_its_names(http: httpx.Client) -> None:
    body = json.dumps(chat()).encode()
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.me+json"):
        assert http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200, kind


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("bogus", 415), ("identity", 200)])
def test_an_encoded_body_is_not_unpacked_and_not_taken_for_json(
    http: httpx.Client, encoding: str, status: int
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = http.post(CHAT, content=json.dumps(chat()), headers=headers)
    assert response.status_code == status
    assert status == 200 or (refused(response, 415)["code"], repr(encoding) in response.text) == (
        "unsupported_media_type", True
    )


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    assert refused(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert refused(http.post("/v1/chat/completions/", json=chat()), 404)["code"] == "not_found"
    assert refused(http.get(CHAT), 405)["code"] == "method_not_allowed"
    assert refused(http.delete("/v1/models"), 405)["code"] == "method_not_allowed"
    assert refused(http.post("/sleep"), 404), "administration is off unless it is asked for"


def test_an_unknown_model(server: Running, http: httpx.Client) -> None:
    error = refused(http.post(CHAT, json=chat(model="gpt-4" * 100)), 404)
    assert len(error["message"]) < 250
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    refused(http.get("/v1/models/gpt-4"), 404)
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(**chat(model="gpt-4"))


def test_a_body_that_is_too_large(http: httpx.Client) -> None:
    for size in (10_001, 30_000, 2_000_000):
        error = refused(http.post(COMPLETION, json=completion(prompt="x" * size)), 413)
        assert error["code"] == "request_too_large" and "10,000" in error["message"]

    def chunked() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 1000

    refused(http.post(COMPLETION, content=chunked(), headers={"content-type": "application/json"}), 413)
    assert http.get("/health").status_code == 200


def test_embeddings_and_tokens_refuse_in_the_same_form(http: httpx.Client) -> None:
    assert refused(http.post("/v1/embeddings", json={"model": "fake", "input": []}), 400)["param"] == "input"
    error = refused(http.post("/v1/embeddings", json={"model": "fake", "input": "a", "dimensions": 2}), 400)
    assert error["param"] == "dimensions"
    assert refused(http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert refused(post(http, "/tokenize", {"prompt": "\ud800"}), 400)["param"] == "prompt"
    assert refused(http.post("/detokenize", json={"tokens": [-1]}), 400)["param"] == "tokens[0]"
    assert http.post("/detokenize", json={"tokens": [2**31 - 1]}).status_code == 400


def many(item: Any) -> list[Any]:
    return [item] * 60_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": many({"bad": 1})}),
        (CHAT, {"messages": many(1)}),
        (CHAT, {"tools": many({})}),
        (CHAT, {"stop_token_ids": many("a")}),
        (CHAT, {"stop": many(1)}),
        (CHAT, {"guided_choice": many(1)}),
        (CHAT, {"logit_bias": {str(number): "x" for number in range(60_000)}}),
        (CHAT, {f"name{number}": 1 for number in range(60_000)}),
        (CHAT, {"messages": [{"role": "user", "content": many(1)}]}),
        (COMPLETION, {"prompt": many("")}),
    ],
)
def test_a_body_of_many_mistakes_is_refused_by_the_first_of_them(path: str, fields: Any) -> None:
    kind: type[Body] = ChatRequest if path == CHAT else CompletionRequest
    body = {"model": "fake", "messages": HELLO} if path == CHAT else {"model": "fake"}
    tracemalloc.start()
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body | fields)
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()
    assert len(refusal.value.errors()) == 1


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_that_is_nested_too_deep(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(100)}}]
    assert refused(http.post(CHAT, json=chat(tools=tools)), 400)["param"] == "tools[0].function.parameters"
    assert refused(http.post(CHAT, json=chat(guided_json=nested(100))), 400)["param"].startswith("guided_json")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("[" * 4000, 400), ("[" * 200 + "]" * 200, 400), ("[" + "{}," * 60_000 + "{}]", 400), ("not JSON [{", 200),
     ('{"a": "' + "[{" * 60 + '"}', 200)],
    ids=["open", "deep", "many", "no JSON", "texts"],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_limited_as_bodies_are(tmp_path: Any, arguments: str, status: int) -> None:
    """Templates get them as values, which takes a parser and copies."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]
    with running(FakeCore(tokenizer(tmp_path), max_model_len=500_000)) as server:
        response = server.http().post(CHAT, json=chat(messages=messages, max_tokens=3))
    if status == 200:
        assert response.status_code == 200, response.text
    else:
        assert refused(response, 400)["param"] == "messages[0].tool_calls[0].function.arguments"


def test_what_a_request_brings_on_itself_is_no_fault_of_the_server(tmp_path: Any) -> None:
    core = FakeCore(tokenizer(tmp_path))
    kind: Any = "request"
    step = core.step
    core.step = lambda: [
        replace(delta, finish_reason="error", error="the guide allows nothing.", error_kind=kind) for delta in step()
    ]
    with running(core) as server:
        refused(server.http().post(CHAT, json=chat()), 400)
        kind = "engine"
        response = server.http().post(CHAT, json=chat())
        refused(response, 500)
        assert response.headers["x-should-retry"] == "false", "it would fail again"


def test_of_a_text_that_cannot_fit_only_the_beginning_is_tokenized(tmp_path: Any) -> None:
    core = FakeCore(tokenizer(tmp_path))
    lengths: list[int] = []
    with running(core) as server:
        tokens = server.server.config.app.state.service.tokens
        encoded = tokens._encoded
        tokens._encoded = lambda text, special: lengths.append(len(text)) or encoded(text, special)
        for path, body in (
            (COMPLETION, completion(prompt="x" * 100_000)),
            (CHAT, chat(messages=[{"role": "user", "content": "x" * 100_000}])),
            ("/tokenize", {"prompt": "x" * 100_000}),
        ):
            assert refused(server.http().post(path, json=body), 400)["code"] == "context_length_exceeded"
    assert len(lengths) == 3 and max(lengths) <= PREFIX * (core.max_model_len + SLACK)


def test_embeddings_have_a_limit_of_their_own(http: httpx.Client) -> None:
    asked = {"model": "fake", "input": [[65]] * 20}
    assert len(http.post("/v1/embeddings", json=asked).json()["data"]) == 20, "max_choices is about answers"
    error = refused(http.post("/v1/embeddings", json={"model": "fake", "input": [[1]] * 2049}), 400)
    assert error["param"] == "input" and "2,048" in error["message"]


def test_a_sentence_about_a_context_is_not_about_its_length() -> None:
    assert as_api_error(RequestError("the context is odd: correct it.")).body["error"]["code"] is None
    told = as_api_error(RequestError("too long.", param="prompt", code="context_length_exceeded")).body["error"]
    assert (told["param"], told["code"]) == ("prompt", "context_length_exceeded")


def test_a_refusal_repeats_the_value_or_its_beginning(http: httpx.Client) -> None:
    assert "temperature is 3: " in refused(http.post(CHAT, json=chat(temperature=3)), 400)["message"]
    assert 'n is "three": ' in refused(http.post(CHAT, json=chat(n="three")), 400)["message"]
    for length, told in ((58, "x" * 58 + '": '), (59, "x" * 56 + "...: ")):
        assert f'n is "{told}' in refused(http.post(CHAT, json=chat(n="x" * length)), 400)["message"], length


def test_the_description_tells_of_no_status_that_is_not_used(http: httpx.Client) -> None:
    described = http.get("/openapi.json").text
    assert '"422"' not in described and "HTTPValidationError" not in described and "/page.js" not in described


def test_a_full_queue_asks_to_come_again(tmp_path: Any) -> None:
    with running(FakeCore(tokenizer(tmp_path), max_running=2)) as server:
        response = server.http().post(CHAT, json=chat(n=3))
        error = refused(response, 429)
        assert error["code"] == "rate_limit_exceeded" and response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            server.client().chat.completions.create(**chat(n=3))


def test_a_bug_is_told_without_its_details(tmp_path: Any) -> None:
    core = FakeCore(tokenizer(tmp_path))
    core.add = None  # type: ignore[assignment,method-assign]
    with running(core) as server:
        response = server.http().post(CHAT, json=chat())
        error = refused(response, 500)
        assert response.headers["x-request-id"] and response.headers["x-should-retry"] == "false"
        assert 'status="500"' in server.http().get("/metrics").text
        assert error["type"] == "server_error" and "NoneType" not in error["message"]
    assert as_api_error(RuntimeError("a password")).body["error"]["message"].count("password") == 0


def test_an_engine_that_dies_fails_its_requests_and_says_so(tmp_path: Any) -> None:
    with running(FakeCore(tokenizer(tmp_path), fail_at=3)) as server:
        http = server.http()
        assert http.get("/health").status_code == 200
        error = refused(http.post(CHAT, json=chat()), 503)
        assert error["code"] == "engine_dead" and "on fire" in error["message"]
        assert refused(http.post(CHAT, json=chat()), 503)["code"] == "engine_dead"
        refused(http.get("/health"), 503)
        assert http.get("/metrics").status_code == 200, "what happened can still be looked at"
        assert server.core.closed


def test_an_engine_that_dies_ends_a_stream_with_an_error(tmp_path: Any) -> None:
    with running(FakeCore(tokenizer(tmp_path), fail_at=3, seconds=0.01)) as server:
        stream = server.client().chat.completions.create(stream=True, **chat())
        with pytest.raises(openai.APIError, match="on fire"):
            for _ in stream:
                pass
