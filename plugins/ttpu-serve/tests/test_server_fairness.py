"""Large bodies and long texts of one client do not hold up others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from fake_core import FakeCore
from serving import running, until

from ttpu_serve.api.client_pace import ProcessorPace
from ttpu_serve.api.fair_executor import FairExecutor
from ttpu_serve.server.body import MOST_CONTAINERS, MOST_DEPTH, check_shape, parsed
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.events import CLIENT
from ttpu_serve.server.tokens import LONG_BODY, Tokens

WORDS: Any = {"model": "fake", "prompt": "say: hello", "max_tokens": 5}


def test_clients_take_turns() -> None:
    executor, gate, order = FairExecutor("test"), threading.Event(), []
    first = executor.submit("a", gate.wait)
    until(first.running)
    futures = [executor.submit(client, lambda c=client: order.append(c)) for client in "aaabbc"]
    dropped = executor.submit("a", lambda: order.append("never"))
    assert dropped.cancel()
    gate.set()
    for future in futures:
        future.result(5)
    assert order == ["a", "b", "c", "a", "b", "a"]
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit("a", gate.wait)


def test_small_calls_of_a_client_come_before_its_large_ones() -> None:
    executor, gate, order = FairExecutor("test"), threading.Event(), list[str]()
    first = executor.submit("a", gate.wait)
    until(first.running)
    calls = [("a", "5", 5), ("a", "3", 3), ("a", "5 again", 5), ("b", "9 of another", 9), ("a", "1", 1)]
    futures = [executor.submit(client, partial(order.append, name), size) for client, name, size in calls]
    gate.set()
    for future in futures:
        future.result(5)
    assert order == ["1", "9 of another", "3", "5", "5 again"]
    executor.close()


def test_an_executor_passes_errors_on_and_goes_on() -> None:
    executor = FairExecutor("test")
    failing = executor.submit("a", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(5)
    assert executor.submit("a", lambda: 7).result(5) == 7
    gate = threading.Event()
    executor.submit("a", gate.wait)
    waiting = executor.submit("b", lambda: 7)
    executor.close()
    gate.set()
    assert waiting.cancelled()


def test_a_client_that_took_more_than_its_share_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessorPace, "SHARE", 0.5)
    pace = ProcessorPace()
    first, second = FairExecutor("first", pace), FairExecutor("second", pace)
    first.submit("a", partial(time.sleep, 0.01)).result(5)
    pace.worked("a", 2.1)  # of which two seconds are free
    began = time.monotonic()
    late = second.submit("a", time.monotonic)
    assert second.submit("b", time.monotonic).result(5) - began < 0.15, "another client's call, though it came later"
    assert late.result(5) - began >= 0.19
    pace.worked("a", 1.0)
    waiting = first.submit("a", time.monotonic)
    first.close()
    assert waiting.cancelled()
    second.close()


def test_a_call_costs_its_client_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = ProcessorPace()
    charged: list[tuple[str, float]] = []
    monkeypatch.setattr(pace, "charge", lambda client, seconds: charged.append((client, seconds)))
    executor = FairExecutor("test", pace)
    with pytest.raises(ZeroDivisionError):
        executor.submit("a", lambda: [time.sleep(0.02), 1 / 0]).result(5)
    executor.submit("b", partial(time.sleep, 0.04)).result(5)
    until(lambda: len(charged) == 2)
    assert [client for client, _ in charged] == ["a", "b"]
    for (_, seconds), least in zip(charged, (0.02, 0.04), strict=True):
        assert least <= seconds * ProcessorPace.SHARE < least + 0.5
    executor.close()


def test_a_client_waits_at_most_ten_seconds_whatever_it_cost() -> None:
    pace = ProcessorPace()
    pace.worked("a", 1e6)
    assert 9.9 < pace.wait("a") <= 10.0
    assert pace.wait("b") == 0.0


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" * 100_000, "levels"),
        (b'{"a":' * (MOST_DEPTH + 1) + b"1" + b"}" * (MOST_DEPTH + 1), "levels"),
        (b"[" + b"{}," * MOST_CONTAINERS + b"1]", "objects and arrays"),
        (b"[" + b"1," * 1000 + b"1]", "values"),
        (b'{"a\\\\": [' + b"1," * 1000 + b"1]}", "values"),
        (b'{"text": "\\"' + b"," * 2000 + b'", "ids": [' + b"1," * 1000 + b"1]}", "values"),
    ],
    ids=["open", "deep", "containers", "values", "escaped backslash", "escaped quote"],
)
def test_bodies_of_very_many_or_very_deep_values_are_refused_before_they_are_parsed(body: bytes, what: str) -> None:
    with pytest.raises(ApiError, match=what) as refusal:
        check_shape(body, 1000 if what == "values" else 10**6)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        {"text": ",[{" * 5000 + '\\"'},
        {"ids": list(range(900))},
        json.loads("[" * MOST_DEPTH + "]" * MOST_DEPTH),
        {"a": ['"', "\\", '\\"', "[[[["] * 200},
    ],
)
def test_texts_may_hold_any_number_of_commas_and_brackets(value: Any) -> None:
    assert parsed(json.dumps(value).encode(), 1000) == value


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 2_000_000, b'"\\' * 2_000_000, b"\\" * 4_000_000, b'"' * 4_000_001])
def test_the_shape_of_any_bytes_is_found_in_linear_time(body: bytes) -> None:
    """A search that begins again at each quote would take hours."""
    check_shape(b"[" * (MOST_DEPTH // 2) + b"," * 2000 + body, 5000)


def test_a_server_refuses_them_by_a_sentence(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        headers = {"content-type": "application/json"}
        for body in (b'{"model": "fake", "prompt": [' + b"1," * 500_000 + b"1]}", b"[" * 1000):
            response = server.http().post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 400 and response.json()["error"]["code"] == "request_too_large"
        response = server.http().post("/v1/completions", content=b" " * 3_000_000, headers=headers)
        assert response.status_code == 413, "so much cannot be a prompt of this context"
        twice = b'{"model": "fake", "model": "fake", "prompt": "' + b"x" * 100_000 + b'"}'
        response = server.http().post("/v1/completions", content=twice, headers=headers)
        assert response.json()["error"]["param"] == "model", "long bodies are checked as short ones"


class SlowTokenizer:
    """Takes long for long texts, and notes which of them it reads."""

    def __init__(self, read: list[str], gate: threading.Event) -> None:
        self.read, self.gate = read, gate

    def __deepcopy__(self, memo: Any) -> SlowTokenizer:
        return SlowTokenizer(self.read, self.gate)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.read.append(text)
        if len(text) > 100:
            self.gate.wait(10)
        return {"input_ids": [1] * (len(text) // 100)}


def test_what_a_client_that_left_asked_for_is_not_tokenized() -> None:
    read: list[str] = []
    gate = threading.Event()
    tokens = Tokens(SlowTokenizer(read, gate))

    async def scenario() -> None:
        CLIENT.set(("a", LONG_BODY))
        running = asyncio.ensure_future(tokens.encode("x" * 100_000, most=10))
        waiting = asyncio.ensure_future(tokens.encode("y" * 100_000, most=10))
        while not read:
            await asyncio.sleep(0.001)
        CLIENT.set(("b", 10))
        assert await asyncio.wait_for(tokens.encode("short"), 5) == [], "short requests have a thread of their own"
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        gate.set()
        CLIENT.set(("c", LONG_BODY))
        assert await asyncio.wait_for(tokens.encode("z" * 50), 5) == []

    asyncio.run(scenario())
    tokens.close()
    assert [text[0] + str(len(text)) for text in read] == ["x296", "s5", "z50"], "the rest of x was not read either"


def test_long_texts_to_tokenize_delay_nobody_else(bytes_tokenizer: Any) -> None:
    """On a real tokenizer: a short prompt does not wait until all long ones are read."""
    core = FakeCore(bytes_tokenizer, max_model_len=60_000)
    with running(core) as server, ThreadPoolExecutor(4) as pool:
        http: httpx.Client = server.http()
        http.post("/v1/completions", json=WORDS)
        long = [pool.submit(http.post, "/tokenize", json={"prompt": "a b" * 600_000}) for _ in range(4)]
        until(lambda: server.server.config.app.state.service.tokens._long._thread is not None)
        assert http.post("/v1/completions", json=WORDS).status_code == 200
        assert not all(each.done() for each in long)
        assert {each.result().json()["error"]["code"] for each in long} == {"context_length_exceeded"}
