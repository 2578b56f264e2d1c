"""Refusals of one address are paced; answers are not."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_core import FakeCore
from serving import running

from ttpu_core.errors import RequestError
from ttpu_serve.api import client_pace
from ttpu_serve.server import refusals, run
from ttpu_serve.server.refusals import RefusalPace
from ttpu_serve.server.settings import ServerSettings

GOOD = {"model": "fake", "prompt": "Hi", "max_tokens": 2}
BAD = GOOD | {"max_tokens": -1}


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(client_pace.time, "monotonic", lambda: self.now)


def test_a_burst_is_sent_at_once_and_the_rest_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace(10.0)
    waits = [pace.wait("a") for _ in range(30)]
    assert waits[:24] == pytest.approx([0.0] * 21 + [0.1, 0.2, 0.3])
    assert pace.wait("b") == 0.0, "another address has its own pace"
    clock.now += 3.0
    assert pace.wait("a") == 0.0


def test_a_refusal_waits_at_most_five_seconds_and_a_client_is_forgiven_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RefusalPace(1.0)
    assert max(pace.wait("a") for _ in range(1000)) == refusals.LONGEST == 5
    clock.now += refusals.LONGEST + refusals.BURST + 0.01
    assert pace.wait("a") == 0.0


def test_without_a_rate_nothing_waits() -> None:
    pace = RefusalPace(None)
    assert {pace.wait("a") for _ in range(1000)} == {0.0}


def test_clients_that_would_not_wait_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_pace, "MOST_CLIENTS", 3)
    clock, pace = Clock(monkeypatch), RefusalPace(1.0)
    for name in "abc":
        pace.wait(name)
    for _ in range(9):
        pace.wait("c")
    clock.now += 2.0
    assert pace.wait("d") == 0.0
    assert set(pace._pace._due) == {"c", "d"}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(RequestError, match="refusal_rate"):
        ServerSettings(refusal_rate=rate)


def test_refusals_are_delayed_and_hold_no_place(bytes_tokenizer: Any) -> None:
    settings = ServerSettings(refusal_rate=2.0, max_concurrent=1)
    with running(FakeCore(bytes_tokenizer), settings) as server, server.http() as client:
        began = time.monotonic()
        for _ in range(5):  # two seconds' worth and one
            assert client.post("/v1/completions", json=BAD).status_code == 400
        assert time.monotonic() - began < 0.4
        with ThreadPoolExecutor(3) as pool, server.http() as other:
            began = time.monotonic()
            refused = [pool.submit(other.post, "/v1/completions", json=BAD) for _ in range(3)]
            time.sleep(0.1)  # they were refused, and wait
            answered = client.post("/v1/completions", json=GOOD)
            assert (answered.status_code, time.monotonic() - began < 0.4) == (200, True)
            assert {one.result().status_code for one in refused} <= {400, 429}
            assert time.monotonic() - began > 1.0
        began = time.monotonic()
        assert client.get("/nothing").status_code == 404
        assert time.monotonic() - began > 0.3, "refusals of every kind are"


def test_a_server_that_leaves_waits_for_no_refusal(bytes_tokenizer: Any) -> None:
    settings = ServerSettings(refusal_rate=0.2, drain_timeout=0.2)
    with running(FakeCore(bytes_tokenizer), settings) as server, server.http() as client:
        for _ in range(2):
            client.post("/v1/completions", json=BAD)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/v1/completions", json=BAD)
            time.sleep(0.2)
            began = time.monotonic()
            server.stop()
            server.thread.join(20)
            assert waiting.result().status_code == 400
            assert time.monotonic() - began < run.LAST_WORDS_SECONDS + 2


def test_what_is_there_at_the_start_is_kept_from_the_collector() -> None:
    before = gc.get_freeze_count()
    try:
        run._collect_no_more_what_stays()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
