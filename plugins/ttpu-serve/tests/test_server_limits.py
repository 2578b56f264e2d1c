"""What a server does with those who have no key, ask too much, read too slowly, leave early, or come at its end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import typer
from fake_core import FakeCore
from serving import Running, running, until
from typer.testing import CliRunner

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.output_queue import EngineDeadError
from ttpu_serve.cli.serve import serve
from ttpu_serve.server import ServerSettings, create_app
from ttpu_serve.server.events import EventStream
from ttpu_serve.server.run import OPEN_FILES, Place, _allow_many_files, config_of, run

openai = pytest.importorskip("openai")

command = typer.Typer()
command.command()(serve)
HELLO: Any = {"model": "fake", "messages": [{"role": "user", "content": "say: hello"}]}
ENDLESS: Any = {"model": "fake", "prompt": "say: on and on", "max_tokens": 4000, "ignore_eos": True}


def test_a_key_is_needed_where_one_is_set(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(api_keys=("one", "two"))) as server:
        for key in ("one", "two"):
            assert server.client(key).models.list().data
        for key in ("three", "on", "onee"):
            with pytest.raises(openai.AuthenticationError) as refusal:
                server.client(key).chat.completions.create(**HELLO)
            assert refusal.value.code == "invalid_api_key"
        http = server.http()
        assert http.post("/v1/chat/completions", json=HELLO).headers["www-authenticate"] == "Bearer"
        for header in ("one", "Basic one", "Bearer"):
            refused = http.get("/v1/models", headers={"authorization": header})
            assert refused.status_code == 401 and "one in another form" in refused.json()["error"]["message"]
        for path in ("/tokenize", "/v1/embeddings", "/v1/nothing"):
            assert http.post(path, json={}).status_code == 401, path
        for path in ("/health", "/metrics", "/", "/stats", "/openapi.json"):
            assert http.get(path).status_code == 200, path
        assert http.get("/openapi.json").json()["security"] == [{"key": []}]


@pytest.mark.parametrize("key", ["", " ", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_at_once(key: str) -> None:
    with pytest.raises(RequestError):
        ServerSettings(api_keys=(key,))


def test_no_more_requests_at_once_than_allowed(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.01), ServerSettings(max_concurrent=2)) as server:
        client = server.client()
        first = [client.completions.create(stream=True, **body(200)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**body(1))
        assert server.http().get("/health").status_code == 200, "watching is always possible"
        for stream in first:
            stream.close()
        until(lambda: not server.core.outputs)
        assert client.completions.create(**body(1)).choices


def body(tokens: int) -> Any:
    extra = {"ignore_eos": True}
    return {"model": "fake", "prompt": "say: on and on", "max_tokens": tokens, "extra_body": extra}


def test_a_client_that_leaves_a_stream_aborts_its_request(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.005, max_model_len=5000)) as server:
        stream = server.client().completions.create(stream=True, **body(4000))
        next(iter(stream))
        assert server.core.outputs
        stream.close()
        until(lambda: not server.core.outputs)
        assert len(server.core.aborted) == 1
        until(lambda: 'reason="abort"' in server.http().get("/metrics").text)


def test_a_client_that_leaves_before_its_answer_aborts_all_of_its_request(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.005, max_model_len=5000)) as server:
        asked = ENDLESS | {"prompt": ["say: a", "say: b", "say: c"]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=0.3)
        until(lambda: not server.core.outputs)
        assert len(set(server.core.aborted)) == 3
        until(lambda: 'status="499"' in server.http().get("/metrics").text)


def test_a_client_that_leaves_before_its_stream_begins_leaves_nothing_behind() -> None:
    ended: list[str] = []

    async def values() -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def stuck(_: Any) -> None:
        await asyncio.sleep(60)

    response = EventStream(values(), None, lambda: ended.append("answers"))
    asyncio.run(asyncio.wait_for(response({"type": "http"}, gone, stuck), 5))
    assert ended == ["answers"]


@pytest.mark.parametrize("error", [OSError("no route"), TimeoutError()])
def test_a_stream_that_cannot_be_sent_says_why_except_that_its_client_did_not_read(error: Exception) -> None:
    async def values() -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def waits() -> Any:
        await asyncio.sleep(60)

    async def fails(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise error

    response = EventStream(values(), None)
    sending = asyncio.wait_for(response({"type": "http"}, waits, fails), 5)
    with pytest.raises(OSError, match="no route") if not isinstance(error, TimeoutError) else nullcontext():
        asyncio.run(sending)


def test_a_request_that_takes_too_long_is_ended(bytes_tokenizer: Any) -> None:
    settings = ServerSettings(request_timeout=0.15)
    with running(FakeCore(bytes_tokenizer, seconds=0.01, max_model_len=5000), settings) as server:
        response = server.http().post("/v1/completions", json=ENDLESS)
        assert response.status_code == 408 and response.json()["error"]["code"] == "request_timeout"
        assert response.headers["x-should-retry"] == "false", "it would take as long again"
        text = ""
        with pytest.raises(openai.APIError, match=r"0\.15 s"):
            for chunk in server.client().completions.create(stream=True, **body(4000)):
                text += chunk.choices[0].text
        assert text.startswith("on and"), "what was said until then was sent"
        until(lambda: not server.core.outputs)


def test_a_reader_that_stops_reading_loses_its_place(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer, max_model_len=100_000)
    asked = ENDLESS | {"max_tokens": 90_000, "stream": True, "logprobs": 5}
    settings = ServerSettings(write_timeout=0.3, request_timeout=None)
    with running(core, settings) as server, stalled_reader(server, asked):
        until(lambda: core.outputs)
        until(lambda: not core.outputs, 30)
        assert server.http().post("/v1/completions", json=ENDLESS | {"max_tokens": 3}).status_code == 200


def stalled_reader(server: Running, asked: Any) -> socket.socket:
    """A client that sends a request and reads nothing, with little room for what it does not read."""
    host, port = server.url.removeprefix("http://").split(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    reader.connect((host, int(port)))
    content = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}"
    )
    reader.sendall(head.encode() + b"\r\n\r\n" + content)
    return reader


def test_a_server_that_is_told_to_leave_finishes_what_it_has(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.01), ServerSettings(drain_timeout=20)) as server:
        stream = iter(server.client().completions.create(stream=True, **body(60)))
        text = next(stream).choices[0].text
        server.stop()
        for chunk in stream:
            text += chunk.choices[0].text
        assert len(text) == 60 and chunk.choices[0].finish_reason == "length"
        server.thread.join(10)
        assert not server.thread.is_alive() and server.core.closed
        with pytest.raises(httpx.ConnectError):
            server.http().get("/health")


def test_a_server_does_not_wait_for_ever(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer, seconds=0.01, max_model_len=50_000)
    with running(core, ServerSettings(drain_timeout=1)) as server:
        stream = iter(server.client().completions.create(stream=True, **body(40_000)))
        next(stream)
        began = time.monotonic()
        server.stop()
        server.thread.join(10)
        assert time.monotonic() - began < 5 and core.closed
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in stream:
                pass


def test_an_engine_that_drains_takes_nothing_new(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.01)) as server:
        stream = iter(server.client().completions.create(stream=True, **body(30)))
        next(stream)
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(asyncio.run(server.engine.drain(10))))
        thread.start()
        until(lambda: not server.engine.accepting)
        response = server.http().post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
        assert server.http().get("/health").status_code == 503, "a balancer sends nothing here any more"
        assert sum(1 for _ in stream) >= 1
        thread.join(10)
        assert drained == [True]


def test_administration_only_where_it_is_enabled(bytes_tokenizer: Any, tmp_path: Path) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(enable_admin=True)) as server:
        http = server.http()
        assert http.post("/sleep").status_code == 200 and http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/v1/chat/completions", json=HELLO).status_code == 400
        assert http.post("/wake_up").status_code == 200 and http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/v1/chat/completions", json=HELLO).status_code == 200
        assert http.post("/reset_prefix_cache").status_code == 200
        load = {"lora_name": "poet", "lora_path": str(tmp_path)}
        assert http.post("/v1/load_lora_adapter", json=load | {"lora_path": "/nowhere"}).status_code == 400
        too_long = load | {"lora_path": "/" + "a" * 5000}
        assert http.post("/v1/load_lora_adapter", json=too_long).status_code == 400
        assert http.post("/v1/load_lora_adapter", json=load | {"lora_name": "fake"}).status_code == 400
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert http.post("/v1/load_lora_adapter", json=load | {"load_inplace": False}).status_code == 400
        replaced = http.post("/v1/load_lora_adapter", json=load | {"load_inplace": True})
        assert replaced.status_code == 200 and "x-ttpu-warning" not in replaced.headers
        assert http.post("/v1/chat/completions", json=HELLO | {"model": "poet"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
        assert gone.status_code == 404 and "none is loaded" in gone.json()["error"]["message"]


def test_other_sites_may_call_only_where_they_are_named(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(allowed_origins=("https://mine.example",))) as server:
        for origin, allowed in (("https://mine.example", "https://mine.example"), ("https://other.example", None)):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            response = server.http().options("/v1/chat/completions", headers=headers)
            assert response.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(("name", "value"), [("max_body_bytes", 0), ("max_concurrent", -1), ("request_timeout", 0.0)])
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        ServerSettings(**{name: value})


def test_a_priority_and_a_salt_are_passed_on(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer)
    seen: list[Any] = []
    add = core.add

    def noting(
        name: str, prompt: Any, params: SamplingParams, *, priority: int = 0, cache_salt: str = "", **options: Any
    ) -> None:
        seen.append((priority, cache_salt))
        add(name, prompt, params, **options)

    core.add = noting  # type: ignore[method-assign]
    with running(core, ServerSettings(allow_priority=True)) as server:
        server.client().chat.completions.create(extra_body={"priority": -3, "cache_salt": "mine"}, **HELLO)
        asked = {"model": "fake", "prompt": "hello", "cache_salt": "yours"}
        assert server.http().post("/v1/completions", json=asked).status_code == 200
        assert server.http().post("/v1/chat/completions", json=HELLO | {"cache_salt": ""}).status_code == 400
    assert seen == [(-3, "mine"), (0, "yours")]


def test_no_client_goes_before_others_unless_it_may(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        response = server.http().post("/v1/chat/completions", json=HELLO | {"priority": -3})
        assert response.status_code == 400 and response.json()["error"]["param"] == "priority"
        assert server.http().post("/v1/chat/completions", json=HELLO | {"priority": 0}).status_code == 200


def test_a_server_that_leaves_says_so_until_its_answers_have_ended(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer, seconds=0.01, max_model_len=50_000)
    with running(core, ServerSettings(drain_timeout=1)) as server:
        stream = iter(server.client().completions.create(stream=True, **body(40_000)))
        next(stream)
        server.stop()
        until(lambda: not server.engine.accepting)
        assert server.http().get("/health").status_code == 503, "a balancer sends nothing here any more"
        with pytest.raises(openai.APIError, match="shuts down"):
            for _ in stream:
                pass


def test_what_a_server_that_leaves_cannot_wait_for_is_told_so(
    bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before it is a request of the engine."""
    monkeypatch.setattr("ttpu_serve.server.run.LAST_WORDS_SECONDS", 1)
    gate, reading = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []
    try:
        with running(FakeCore(bytes_tokenizer)) as server:
            tokens = server.server.config.app.state.service.tokens
            tokens.encode_now = lambda *_: reading.set() or (gate.wait(20) and [1])
            asked = {"model": "fake", "prompt": "x"}
            client = threading.Thread(target=lambda: answers.append(server.http().post("/v1/completions", json=asked)))
            client.start()
            assert reading.wait(10)
            server.stop()
            client.join(10)
    finally:
        gate.set()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://mine.example", "sec-fetch-site": "cross-site"}, 200),
    ],
)
def test_other_sites_pages_administrate_nothing(bytes_tokenizer: Any, headers: Any, status: int) -> None:
    settings = ServerSettings(enable_admin=True, allowed_origins=("https://mine.example",))
    with running(FakeCore(bytes_tokenizer), settings) as server:
        http = server.http()
        document = http.get("/openapi.json")
        paths = document.json()["paths"]
        assert not any("422" in operation["responses"] for path in paths.values() for operation in path.values())
        assert "ValidationError" not in document.text, "bodies that do not fit get 400, in OpenAI's form"
        routes = [
            (path, method)
            for path, operations in paths.items()
            for method, operation in operations.items()
            if operation.get("tags") == ["Administration"]
        ]
        assert len(routes) >= 6
        for path, method in routes:
            json = {"lora_name": "poet", "lora_path": "/nowhere"} if "adapter" in path else None
            found = http.request(method, path, headers=headers, json=json).status_code
            assert (found == 403) is (status == 403), path
        assert http.post("/wake_up", headers=headers).status_code == status
        assert http.post("/v1/chat/completions", json=HELLO, headers=headers).status_code == 200


def test_by_default_other_sites_may_not_read_and_no_page_loads_scripts_from_elsewhere(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        http = server.http()
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            assert http.get(path).status_code == 404
        origin = {"origin": "https://evil.example"}
        for response in (http.get("/v1/models", headers=origin), http.post("/v1/completions", json={}, headers=origin)):
            assert not any(name.startswith("access-control") for name in response.headers)
        page = http.get("/")
        policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "server" not in page.headers, "which would name uvicorn"
        assert "https://" not in page.text and "<script>" not in page.text and " onclick" not in page.text
        assert page.headers["x-content-type-options"] == "nosniff"


def test_prompts_are_cut_where_that_is_asked_for(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer)
    with running(core) as server:
        http = server.http()
        asked = {"model": "fake", "prompt": "x" * 400 + "say: hello", "max_tokens": 5}
        assert http.post("/v1/completions", json=asked).status_code == 400
        for cut, count in ((10, 10), (-1, core.max_model_len - 1)):
            told = http.post("/v1/completions", json=asked | {"truncate_prompt_tokens": cut, "echo": True}).json()
            assert told["usage"]["prompt_tokens"] == count
            assert told["choices"][0]["text"].startswith(("x" * 400 + "say: hello")[-count:]), "the last tokens stay"
        long = HELLO | {"messages": [{"role": "user", "content": "x" * 400 + " say: hello"}]}
        assert http.post("/v1/chat/completions", json=long).status_code == 400
        told = http.post("/v1/chat/completions", json=long | {"truncate_prompt_tokens": 30}).json()
        assert told["usage"]["prompt_tokens"] == 30
        assert http.post("/v1/completions", json=asked | {"truncate_prompt_tokens": 0}).status_code == 400


def test_a_body_may_have_as_many_bytes_as_said(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_body_bytes=200)) as server:
        headers = {"content-type": "application/json"}
        body = json.dumps(HELLO).encode()
        for size, status in ((200, 200), (201, 413)):
            response = server.http().post("/v1/chat/completions", content=body.ljust(size), headers=headers)
            assert response.status_code == status, size


def test_the_refusal_says_whether_a_key_came(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(api_keys=("one",))) as server:
        for headers, told in (({}, "the request has none"), ({"authorization": "Bearer two"}, "has another one")):
            response = server.http().get("/v1/models", headers=headers)
            assert response.status_code == 401 and told in response.json()["error"]["message"]


@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_clients_are_addresses_or_where_there_are_keys_keys(bytes_tokenizer: Any, keys: tuple[str, ...]) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(api_keys=keys)) as server:
        tokens = server.server.config.app.state.service.tokens
        submit, seen = tokens._short.submit, []
        tokens._short.submit = lambda client, work: seen.append(client) or submit(client, work)
        queue, guided = server.engine._guides, list[str]()
        compile_guide = queue.compile
        queue.compile = lambda guide, client: guided.append(client) or compile_guide(guide, client)
        for key in ("one", "one", "two"):
            asked = {"model": "fake", "prompt": "say: hello", "guided_choice": ["hello"]}
            headers = {"authorization": f"Bearer {key}"}  # which makes nobody another client where there are no keys
            assert server.http(headers=headers).post("/v1/completions", json=asked).status_code == 200
        assert seen == guided == (["one", "one", "two"] if keys else ["127.0.0.1"] * 3)


def test_what_is_open_to_everybody_holds_no_bodies(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_body_bytes=100)) as server:
        http = server.http()
        assert http.request("GET", "/health", content=b"x" * 5000).status_code == 200
        assert http.get("/health").status_code == 200


def test_the_time_that_reading_a_prompt_takes_counts(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer)
    with running(core, ServerSettings(request_timeout=0.1)) as server:
        tokens = server.server.config.app.state.service.tokens
        read = tokens.encode_now

        def slowly(*arguments: Any) -> list[int]:
            time.sleep(0.3)
            return list(read(*arguments))

        tokens.encode_now = slowly
        core.seconds = 0.05
        assert server.http().post("/v1/completions", json=ENDLESS).status_code == 408


def test_an_adapter_with_the_models_name_is_refused_at_once(bytes_tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="adapter 'fake'"):
        create_app(AsyncEngine(FakeCore(bytes_tokenizer, adapters={"fake": 1})))


def test_certificates_are_read_before_a_model_is(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="ssl-certfile"):
        Place(port=0, private_key="key.pem").bind()
    (tmp_path / "cert.pem").write_text("none")
    for name in ("cert.pem", "nothing.pem"):
        with pytest.raises(RequestError, match="certificate"):
            Place(port=0, certificate=str(tmp_path / name)).bind()


def test_a_host_that_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("unknown")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(RequestError, match="nowhere"):
        Place(host="nowhere", port=0).bind()


def test_a_key_that_was_meant_to_be_set_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTPU_API_KEY", "")
    result = CliRunner().invoke(command, ["nowhere"])
    assert isinstance(result.exception, RequestError) and "TTPU_API_KEY" in str(result.exception)


def test_one_of_several_processes_serves_only_if_the_backends_runner_spans_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    monkeypatch.setattr("ttpu_serve.cli.serve._app", lambda name, *_: served.append(name))
    monkeypatch.setattr("ttpu_serve.server.run.run", lambda *_, **__: None)
    monkeypatch.setenv("TTPU_NUM_PROCESSES", "2")
    llama = str(tiny.llama_checkpoint(tmp_path))
    refused = CliRunner().invoke(command, [llama, "--port", "0"])
    assert isinstance(refused.exception, RequestError)
    assert "the runner of the jax backend spans one only" in str(refused.exception) and not served
    monkeypatch.setattr("ttpu_jax.backend.JaxBackend.spans_processes", True)
    assert CliRunner().invoke(command, [llama, "--port", "0"]).exit_code == 0 and served == [llama]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421), ("evil.example:8000", 421), ("", 200), ("127.0.0.1.evil.example", 421),
        ("LOCALHOST.", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("localhost:1", 200),
        ("app.localhost", 200), ("model.internal", 200),
    ],
)  # fmt: skip
def test_a_server_without_a_key_answers_under_its_own_names_alone(
    host: str, status: int, bytes_tokenizer: Any
) -> None:
    """Another site's page can lead its own name to this machine."""
    settings = ServerSettings(allowed_hosts=("model.internal",), enable_admin=True)
    with running(FakeCore(bytes_tokenizer), settings) as server:
        for path in ("/stats", "/is_sleeping"):
            answer = server.http().get(path, headers={"Host": host})
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "unknown_host"


def test_a_server_with_a_key_answers_under_any_name(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(api_keys=("secret",))) as server:
        assert server.http().get("/stats", headers={"Host": "model.example"}).status_code == 200
    with running(FakeCore(bytes_tokenizer), ServerSettings(allowed_hosts=("*",))) as server:
        assert server.http().get("/stats", headers={"Host": "model.example"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/sleep?level=2", 400), ("/sleep?depth=1", 400), ("/sleep?level=1", 200), ("/wake_up?tags=weights", 400),
     ("/wake_up", 200)],
)  # fmt: skip
def test_what_administration_does_not_do_is_refused(path: str, status: int, bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(enable_admin=True)) as server:
        assert server.http().post(path).status_code == status


def test_a_dead_engine_ends_the_server(bytes_tokenizer: Any, tmp_path: Path) -> None:
    """With an error, so that a supervisor starts another process."""
    place = Place(port=0)
    bound = place.bind()
    app = create_app(AsyncEngine(FakeCore(bytes_tokenizer, fail_at=2)), ServerSettings())
    failures: list[Exception] = []
    ready: list[str] = []

    def serve() -> None:
        try:
            run(app, ServerSettings(), place, bound, ready=ready.append, log_level="error")
        except EngineDeadError as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    until(lambda: ready)
    asked = {"model": "fake", "prompt": "say: on", "max_tokens": 9}
    answer = httpx.post(f"{ready[0]}/v1/completions", json=asked, timeout=30)
    assert answer.status_code == 503
    thread.join(20)
    assert not thread.is_alive() and "on fire" in str(failures[0])


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(1024, 4096, 4096), (1024, -1, OPEN_FILES), (1024, 2**40, OPEN_FILES), (-1, -1, None)]
)
def test_as_many_files_may_be_open_as_the_system_allows(
    soft: int, hard: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: found.append(limits))
    _allow_many_files()
    assert found == ([] if wanted is None else [(wanted, hard)])


@pytest.mark.parametrize("level", ["error", "warning", "info"])
def test_requests_are_logged_where_that_is_asked_for(level: str) -> None:
    for asked in (True, False):
        config_of(None, ServerSettings(), Place(), log_level=level, access_log=asked)
        log = logging.getLogger("uvicorn.access")
        assert (log.isEnabledFor(logging.INFO) and log.hasHandlers()) == asked


def test_a_server_at_a_unix_domain_socket(bytes_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a server that was killed leaves it
    place = Place(uds=str(path))
    bound = place.bind()
    bound.listen()
    with pytest.raises(RequestError, match="--uds"):
        Place(uds=str(path)).bind()
    app = create_app(AsyncEngine(FakeCore(bytes_tokenizer, fail_at=40)), ServerSettings())
    ready: list[str] = []

    def serve() -> None:
        with suppress(EngineDeadError):
            run(app, ServerSettings(), place, bound, ready=ready.append, log_level="error")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    until(lambda: ready)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        asked = {"model": "fake", "prompt": "say: on", "max_tokens": 9}
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "on"
        assert ready == [f"unix:{path}"] and path.is_socket()
        client.post("/v1/completions", json={**asked, "prompt": "say: " + "on" * 40, "max_tokens": 90})
    thread.join(20)
    assert not thread.is_alive() and not path.exists()


def test_a_server_behind_a_path_of_a_proxy(bytes_tokenizer: Any) -> None:
    """Whether the proxy strips the path or not; what is open or administration stays so."""
    with pytest.raises(RequestError, match="root_path"):
        ServerSettings(root_path="llama")
    settings = ServerSettings(root_path="/llama", api_keys=("secret",))
    with running(FakeCore(bytes_tokenizer), settings) as server:
        for root in ("", "/llama"):
            assert server.http().get(f"{root}/health").status_code == 200
            assert server.http().get(f"{root}/v1/models").status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert server.http().get(f"{root}/v1/models", headers=key).status_code == 200
        assert server.http().get("/openapi.json").json()["servers"] == [{"url": "/llama"}]
    with running(FakeCore(bytes_tokenizer), ServerSettings(root_path="/llama", enable_admin=True)) as server:
        for root in ("", "/llama"):
            foreign = {"Origin": "http://evil.example"}
            assert server.http().post(f"{root}/reset_prefix_cache", headers=foreign).status_code == 403
