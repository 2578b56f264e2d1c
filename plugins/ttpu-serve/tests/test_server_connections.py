"""What clients on real sockets can do to a server's connections: send slowly, send halves, and not read."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_core import FakeCore
from serving import Running, running, until

from ttpu_serve.server import ServerSettings, connections, middleware

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
REAL = {name: getattr(connections, name) for name in ("HEAD_SECONDS", "LINGER_SECONDS")}
HELLO: Any = {"model": "fake", "prompt": "say: hello", "max_tokens": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits in less time."""
    for name, value in (("SWEEP", 0.05), ("HEAD", 0.4), ("GRACE", 0.15), ("LINGER", 0.3)):
        monkeypatch.setattr(connections, f"{name}_SECONDS", value)


@contextmanager
def connected(server: Running, sent: bytes, *, receives: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent some bytes."""
    with socket.socket() as client:
        if receives is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        client.settimeout(30)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(sent)
        yield client


def everything(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    while part := client.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def up_to(client: socket.socket, end: bytes) -> bytes:
    """What comes until it holds `end`, in however many parts."""
    came = b""
    while end not in came and (part := client.recv(2**16)):
        came += part
    return came


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the web server logs of requests, as one that is started by the command logs it. Threads of earlier tests
    may still log what concerns them."""
    log, lines = logging.getLogger("uvicorn.error"), list[str]()

    def note(record: logging.LogRecord) -> None:
        if any(word in record.getMessage() for word in ("HTTP", "upgrade", "WebSocket", "own")):
            lines.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    before = log.level
    log.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


def refusal(answer: bytes) -> tuple[int, Any]:
    """Status and error of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def number(server: Running) -> int:
    """Connections of a server."""
    protocol: Any = server.server.config.http_protocol_class
    return len(protocol.guard._connections)


@pytest.mark.parametrize("sent", [HEAD, b"G", HEAD + b"x: " + b"y" * 1000])
def test_the_head_of_a_request_has_a_time_limit(bytes_tokenizer: Any, sent: bytes) -> None:
    with running(FakeCore(bytes_tokenizer)) as server, connected(server, sent) as client:
        status, error = refusal(everything(client))
        assert status == 408 and "head" in error["message"]
        until(lambda: number(server) == 0)


def test_a_head_that_comes_byte_by_byte_has_the_same_limit(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server, connected(server, b"") as client:
        began = time.monotonic()
        with pytest.raises(OSError):
            for each in HEAD * 100:
                client.sendall(bytes([each]))
                time.sleep(0.01)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nno number\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    ],
    ids=["tls", "no host", "two hosts", "negative", "two ends", "chunk", "encoding", "control"],
)
def test_what_is_no_http_is_refused_by_a_sentence_and_not_logged(bytes_tokenizer: Any, sent: bytes) -> None:
    with running(FakeCore(bytes_tokenizer)) as server, logged() as lines, connected(server, sent) as client:
        status, error = refusal(everything(client))
        assert status == 400 and error["code"] == "invalid_http"
        assert server.http().get("/health").status_code == 200
        logging.getLogger("uvicorn.error").warning("the server's own")
    assert lines == ["the server's own"]


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_an_upgrade_is_answered_as_any_request_and_not_logged(bytes_tokenizer: Any, protocol: bytes) -> None:
    sent = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: %b\r\n" % protocol
    sent += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    with running(FakeCore(bytes_tokenizer)) as server, logged() as lines, connected(server, sent) as client:
        assert b"200 OK" in everything(client)
    assert not lines


def test_a_silent_connection_is_closed_and_one_between_requests_is_not(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        with connected(server, b"") as client:
            assert everything(client) == b""
        with connected(server, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n") as client:
            assert b"200 OK" in up_to(client, b"}")
            time.sleep(0.8)
            client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in up_to(client, b"}")
            client.sendall(b"GET /vers")
            assert refusal(everything(client))[0] == 408, "the second head has the limit as well"


def test_requests_that_run_for_long_are_no_heads_that_take_long(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.3), ServerSettings(max_incomplete=1)) as server:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.http().post, "/v1/completions", json=HELLO) for _ in range(2)]
        assert [each.result().status_code for each in asked] == [200, 200], "two that run, where one may arrive"


def test_an_address_may_have_so_many_incomplete_requests(bytes_tokenizer: Any) -> None:
    half = HEAD + b'content-length: 100\r\n\r\n{"model": '
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_incomplete=2)) as server:
        with connected(server, half) as oldest, connected(server, half) as second, connected(server, half):
            status, error = refusal(everything(oldest))
            assert status == 429 and "3 requests" in error["message"]
            assert server.http().post("/v1/completions", json=HELLO).status_code == 200
            second.sendall(b'"fake", "prompt": "say: hello", "max_tokens": 5}'.ljust(90))
            assert b"200 OK" in second.recv(2**16), "the others go on"
        until(lambda: number(server) <= 1)


def test_half_sent_bodies_hold_no_slot_and_end(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    half = HEAD + b'content-length: 100\r\n\r\n{"model": '
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_concurrent=1)) as server:
        with connected(server, half):
            assert server.http().post("/v1/completions", json=HELLO).status_code == 200
        monkeypatch.setattr(middleware, "PART_SECONDS", 0.2)
        with connected(server, half) as client:
            assert b"408" in client.recv(2**16).partition(b"\r\n")[0]


def test_a_client_that_leaves_in_its_body_is_no_error(bytes_tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    half = HEAD + b'content-length: 100\r\n\r\n{"model": '
    with running(FakeCore(bytes_tokenizer)) as server:
        with connected(server, half):
            until(lambda: number(server) == 1)
            time.sleep(0.05)
        until(lambda: number(server) == 0)
        metrics = server.http().get("/metrics").text
    assert 'status="499"' in metrics and "Exception" not in capfd.readouterr().err


def test_a_body_that_comes_byte_by_byte_has_a_limit(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "READ_SECONDS", 0.4)
    with (
        running(FakeCore(bytes_tokenizer)) as server,
        connected(server, HEAD + b"content-length: 9999\r\n\r\n") as client,
    ):
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 8:
                client.sendall(b" ")
                time.sleep(0.02)
        answer = client.recv(2**16)
        assert b"408" in answer and b"body did not arrive within 0.4 s" in answer


def test_a_body_that_is_too_large_is_read_on_for_its_client(bytes_tokenizer: Any) -> None:
    """Who still sends reads no refusal."""
    with (
        running(FakeCore(bytes_tokenizer), ServerSettings(max_body_bytes=1000)) as server,
        connected(server, HEAD + b"content-length: 3000\r\n\r\n" + b"x" * 2000) as client,
    ):
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(2**16)
        client.settimeout(5)
        client.sendall(b"x" * 1000)
        assert b"413" in client.recv(2**16).partition(b"\r\n")[0]
    with (
        running(FakeCore(bytes_tokenizer), ServerSettings(max_body_bytes=1000)) as server,
        connected(server, HEAD + b"content-length: 9000\r\n\r\n" + b"x" * 4100) as client,
    ):
        assert b"413" in client.recv(2**16).partition(b"\r\n")[0], "but only so much"


def test_the_limits_are_those_of_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
    seconds = REAL["HEAD_SECONDS"], middleware.READ_SECONDS, middleware.PART_SECONDS
    assert seconds[1] == 60 and f"within {seconds[0]:g} s, its body within a minute and each part" in text
    assert f"of it within {seconds[2]:g} s" in text and ServerSettings().write_timeout == 60
    assert f"{ServerSettings().max_connections:,} connections" in text
    assert f"{ServerSettings().max_incomplete} requests that arrive" in text
    assert f"at most {middleware.MOST_ARRIVING >> 20} MiB" in text
    assert f"reset {REAL['LINGER_SECONDS']:g} s later" in text


def test_bodies_that_arrive_take_so_much_memory(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MOST_ARRIVING", 30_000)
    half = HEAD + b"content-length: 50000\r\n\r\n" + b" " * 20_000
    with running(FakeCore(bytes_tokenizer)) as server, connected(server, half):
        time.sleep(0.05)
        with connected(server, half) as client:
            assert b"429" in client.recv(2**16).partition(b"\r\n")[0]
        assert server.http().post("/v1/completions", json=HELLO).status_code == 200


def test_an_address_may_have_so_many_connections(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_connections=2)) as server:
        with connected(server, HEAD), connected(server, HEAD), connected(server, b"") as third:
            status, error = refusal(everything(third))
            assert status == 429 and "2 connections" in error["message"]
        until(lambda: number(server) == 0)
        assert server.http().post("/v1/completions", json=HELLO).status_code == 200


def test_a_connection_that_ends_makes_room_for_one(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 20)
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_connections=2)) as server, connected(server, HEAD):
        with connected(server, HEAD):
            until(lambda: number(server) == 2)
        until(lambda: number(server) == 1)
        with connected(server, HEAD), connected(server, b"") as third:
            assert refusal(everything(third))[0] == 429


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_let_go(bytes_tokenizer: Any, stream: bool) -> None:
    """Also what was sent and not read is let go, and not only the request."""
    path, body = b"/tokenize", {"model": "fake", "prompt": "x" * 300_000}
    if stream:
        body = HELLO | {"max_tokens": 300_000, "ignore_eos": True, "stream": True, "return_token_ids": True}
        path = b"/v1/completions"
    sent = json.dumps(body).encode()
    asked = HEAD.replace(b"/v1/completions", path) + b"content-length: %d\r\n\r\n%b" % (len(sent), sent)
    core = FakeCore(bytes_tokenizer, max_model_len=400_000)
    with running(core, ServerSettings(write_timeout=0.3)) as server:
        server.server.config.timeout_keep_alive = 1
        with connected(server, asked, receives=2048) as client:
            until(lambda: number(server) == 1)
            until(lambda: number(server) == 0, 20)
            with pytest.raises(ConnectionResetError):
                everything(client)
