"""/v1/batches, asked by OpenAI's own client over a socket; a core without a model answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_cases import CHAT, answers, begun, done, ended, jsonl, line, upload
from fake_core import FakeCore, FakeGuides
from serving import Running, running, until

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.scheduling.scheduler_output import SchedulerConfig
from ttpu_serve.server import ServerSettings, middleware
from ttpu_serve.server.batches import answers as answering
from ttpu_serve.server.batches import lines as batch_lines
from ttpu_serve.server.batches import manager
from ttpu_serve.server.batches.endpoints import ENDPOINTS
from ttpu_serve.server.batches.record import Usage
from ttpu_serve.server.batches.room import Room
from ttpu_serve.server.batches.slots import FairSlots
from ttpu_serve.server.service import BACKGROUND_PRIORITY

openai = pytest.importorskip("openai")

MOST_LINES = 40
SETTINGS = ServerSettings(
    api_keys=("secret", "other"), max_body_bytes=20_000, max_batch_requests=MOST_LINES, allow_priority=True
)


@pytest.fixture(scope="module")
def server(bytes_tokenizer: Any) -> Iterator[Running]:
    with running(FakeCore(bytes_tokenizer, max_model_len=2048, embeds=True), SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client("secret")


@pytest.fixture
def slow(server: Running) -> Iterator[FakeCore]:
    server.core.seconds = 0.01
    yield server.core
    server.core.seconds = 0.0


def test_every_line_is_answered_as_its_endpoint_would_answer_it(client: Any) -> None:
    lines = [line("a"), line("b", temperature=9), line("ü", say="hello wörld", flavour=1), line("d", model="none")]
    batch = done(client, lines, metadata={"for": "tests"})
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert batch.metadata == {"for": "tests"} and batch.errors is None and batch.endpoint == CHAT
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= time.time()
    assert batch.expires_at == batch.created_at + 24 * 3600 and batch.cancelled_at is None
    good = answers(client, batch.output_file_id)
    assert set(good) == {"a", "ü"}
    for name, text in (("a", "a"), ("ü", "hello wörld")):
        one = good[name]
        assert one["error"] is None and one["response"]["status_code"] == 200 and one["response"]["request_id"]
        direct = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": f"say: {text}"}]
        ).model_dump(exclude_unset=True)
        body = one["response"]["body"]
        assert {**body, "id": 0, "created": 0} == {**direct, "id": 0, "created": 0}
    assert "flavour" in good["ü"]["response"]["warning"] and "warning" not in good["a"]["response"]
    assert batch.usage.input_tokens == sum(one["response"]["body"]["usage"]["prompt_tokens"] for one in good.values())
    assert batch.usage.output_tokens == len("a") + len("hello wörld".encode()) + 2
    bad = answers(client, batch.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in bad.items()} == {"b": 400, "d": 404}
    assert bad["b"]["response"]["body"]["error"]["param"] == "temperature"
    assert bad["d"]["response"]["body"]["error"]["code"] == "model_not_found" and bad["d"]["error"] is None
    described = client.files.retrieve(batch.output_file_id)
    assert described.purpose == "batch_output" and described.filename == f"{batch.id}_output.jsonl"
    assert described.bytes == len(client.files.content(batch.output_file_id).read())
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(input_file_id=described.id, endpoint=CHAT, completion_window="24h")
    assert refusal.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("url", "body", "path", "expected"),
    [
        ("/v1/completions", {"prompt": ["say: a", "say: b"], "n": 2}, ("choices", 3, "text"), "b"),
        ("/v1/embeddings", {"input": "abc"}, ("usage", "prompt_tokens"), 3),
        ("/v1/responses", {"input": "say: hi"}, ("output", 0, "content", 0, "text"), "hi"),
        ("/v1/responses", {"input": "say: hi"}, ("store",), False),
        ("/v1/score", {"text_1": "a", "text_2": "a"}, ("data", 0, "score"), pytest.approx(1)),
        ("/rerank", {"query": "a", "documents": ["b" * 60, "a"]}, ("results", 0, "index"), 1),
    ],
)
def test_the_endpoints_that_batches_can_ask(client: Any, url: str, body: Any, path: Any, expected: Any) -> None:
    batch = done(client, [line("x", url, model="fake", **body)], url)
    found = answers(client, batch.output_file_id)["x"]["response"]["body"]
    for key in path:
        found = found[key]
    assert found == expected
    assert batch.usage.input_tokens > 0


def chain(depth: int) -> Any:
    """A form of output whose schema is so deep."""
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return {"type": "json_schema", "json_schema": {"name": "chain", "schema": schema}}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, {"stream": True}, "stream"),
        (CHAT, {"priority": 2**40}, "priority"),
        (CHAT, {"response_format": chain(200)}, "response_format.json_schema.schema"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ("/v1/responses", {"model": "fake", "input": "x", "store": True}, "store"),
        ("/v1/responses", {"model": "fake", "input": "x", "previous_response_id": "y"}, "previous_response_id"),
        ("/v1/embeddings", {"model": "fake", "input": "x", "dimensions": 3}, "dimensions"),
    ],
)
def test_a_line_that_cannot_be_served_names_its_field(client: Any, url: str, body: Any, param: str) -> None:
    batch = done(client, [line("x", url, **body)], url)
    assert batch.output_file_id is None and batch.request_counts.failed == 1
    assert answers(client, batch.error_file_id)["x"]["response"]["body"]["error"]["param"] == param


def written(**fields: Any) -> bytes:
    return jsonl([line("x") | fields])


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (b"\n\n" + b'{"custom_id": "a"', "invalid_json_line", 3),
        (jsonl([line("a")]) + b"\xff\xfe\n", "invalid_json_line", 2),
        (json.dumps(line("a")).encode("utf-16"), "invalid_json_line", 1),
        (jsonl([line("a")]).replace(b"say", b"\0\0\0"), "invalid_json_line", 1),
        (b"[1, 2]\n", "invalid_json_line", 1),
        (b'{"custom_id": "a", "body": {"x": 1, "x": 2}}', None, 1),
        (b"[" * 5000, "request_too_large", 1),
        (b'{"a": ' * 300 + b"1" + b"}" * 300, "request_too_large", 1),
        (b" " * 20_001, "line_too_long", 1),
        (jsonl([line("a"), line("b", say="x" * 20_000)]), "line_too_long", 2),
        (b" \n\t\n\xc2\xa0"[:-2], "empty_file", 2),
        (jsonl([line(str(number)) for number in range(MOST_LINES + 1)]), "too_many_lines", MOST_LINES + 1),
        (written(method="GET"), "invalid_method", 1),
        (written(url="/v1/completions"), "mismatched_url", 1),
        (written(custom_id=None), "missing_required_parameter", 1),
        (written(custom_id=7), "invalid_type", 1),
        (written(custom_id=""), "invalid_custom_id", 1),
        (written(custom_id="x" * 513), "invalid_custom_id", 1),
        (written(body="x"), "invalid_type", 1),
        (written(extra=1), "unknown_field", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_with_the_line(client: Any, content: bytes, code: str, number: int) -> None:
    batch = ended(client, begun(client, content))
    assert batch.status == "failed" and batch.failed_at and batch.in_progress_at is None
    first = batch.errors.data[0]
    assert (first.code, first.line) == (code, number) and first.message
    assert batch.output_file_id is None and batch.error_file_id is None


def test_so_many_problems_are_told(client: Any) -> None:
    batch = ended(client, begun(client, b"no\n" * 1000))
    assert [problem.line for problem in batch.errors.data] == list(range(1, batch_lines.MOST_PROBLEMS + 1))


def test_as_many_lines_as_may_be_with_blank_ones_and_a_mark(client: Any) -> None:
    lines = [line(str(number)) for number in range(MOST_LINES)]
    content = b"\xef\xbb\xbf" + jsonl(lines).replace(b"\n", b"\r\n\r\n").rstrip()
    batch = ended(client, begun(client, content))
    assert batch.request_counts.completed == MOST_LINES
    assert set(answers(client, batch.output_file_id)) == {str(number) for number in range(MOST_LINES)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after.seconds"),
    ],
)
def test_a_batch_that_cannot_be_made_names_its_field(client: Any, fields: Any, param: str) -> None:
    file = upload(client, jsonl([line("a")]))
    given: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    with pytest.raises(openai.APIStatusError) as refusal:
        client.batches.create(**given)
    assert refusal.value.param == param and refusal.value.status_code in (400, 404)


def test_batches_are_listed_in_pages_and_belong_to_their_key(server: Running) -> None:
    client = server.client("other")
    made = [done(client, [line("a")]).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1], "the client asks for all pages"
    page = server.http(headers={"x-api-key": "other"}).get("/v1/batches?limit=2").json()
    assert page["has_more"] and (page["first_id"], page["last_id"]) == (made[2], made[1])
    secret = server.client("secret")
    for ask in (
        lambda: secret.batches.retrieve(made[0]),
        lambda: secret.batches.cancel(made[0]),
        lambda: secret.files.content(client.batches.retrieve(made[0]).output_file_id),
        lambda: secret.batches.create(
            input_file_id=client.batches.retrieve(made[0]).input_file_id, endpoint=CHAT, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not set(made) & {batch.id for batch in secret.batches.list(limit=100)}
    for query in ("limit=0", "limit=101", "after=batch_x"):
        assert server.http(headers={"x-api-key": "other"}).get(f"/v1/batches?{query}").status_code == 400


def test_a_cancelled_batch_keeps_what_is_done(client: Any, slow: FakeCore) -> None:
    batch = begun(client, jsonl([line("short", say="x"), *(line(str(i), say="long " * 200) for i in range(9))]))
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
    before = len(slow.aborted)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert set(answers(client, batch.output_file_id)) == {"short"}
    rest = answers(client, batch.error_file_id)
    assert set(rest) == {str(number) for number in range(9)}
    assert {(one["response"], one["error"]["code"]) for one in rest.values()} == {(None, "batch_cancelled")}
    until(lambda: not slow.outputs)
    assert len(slow.aborted) > before
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_that_fails_its_check_is_not_cancelled_while_it_ends(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, ends, goes_on = manager.BatchWork.finish, threading.Event(), threading.Event()

    def waiting(work: Any) -> None:
        ends.set()
        goes_on.wait(10)
        finish(work)

    monkeypatch.setattr(manager.BatchWork, "finish", waiting)
    batch = begun(client, b"no JSON\n")
    assert ends.wait(10)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    goes_on.set()
    assert ended(client, batch).status == "failed"


def test_a_batch_expires(client: Any, slow: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "WINDOW_SECONDS", 4)  # of which three may be left: times are whole seconds
    batch = ended(client, begun(client, jsonl([line("short", say="x"), line("long", say="long " * 200)])))
    assert batch.status == "expired" and batch.expired_at and batch.errors is None
    assert set(answers(client, batch.output_file_id)) == {"short"}
    assert answers(client, batch.error_file_id)["long"]["error"]["code"] == "batch_expired"


def test_a_batch_goes_on_when_its_file_is_deleted(client: Any, slow: FakeCore) -> None:
    batch = begun(client, jsonl([line(str(number), say="x" * 20) for number in range(20)]))
    client.files.delete(batch.input_file_id)
    assert ended(client, batch).request_counts.completed == 20


def test_lines_come_behind_requests_whose_client_waits(server: Running, client: Any) -> None:
    seen: list[int] = []
    add = server.core.add

    def noting(*arguments: Any, priority: int = 0, **options: Any) -> None:
        seen.append(priority)
        add(*arguments, priority=priority, **options)

    server.core.add = noting
    try:
        done(client, [line("a"), line("b", priority=-5), line("c", priority=3)])
        done(client, [line("a", "/v1/embeddings", model="fake", input="x")], "/v1/embeddings")
        client.embeddings.create(model="fake", input="x")
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "say: x"}])
    finally:
        server.core.add = add
    assert sorted(seen[:3]) == [BACKGROUND_PRIORITY, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 3]
    assert seen[3:] == [BACKGROUND_PRIORITY, 0, 0]


def test_so_many_sequences_of_batches_run_at_once(server: Running, client: Any, slow: FakeCore) -> None:
    """Half of the engine's, unless it is set; requests of several sequences count as so many."""
    most = 0
    step = slow.step

    def noting() -> Any:
        nonlocal most
        most = max(most, len(slow.outputs))
        return step()

    slow.step = noting  # type: ignore[method-assign]
    try:
        lines = [line(str(number), say="x" * 9, n=2 if number % 3 else 1) for number in range(20)]
        assert done(client, lines).request_counts.completed == 20
    finally:
        slow.step = step  # type: ignore[method-assign]
    assert most == slow.scheduler.config.max_num_seqs // 2 == 4
    assert "ttpu:batch_requests_running" in server.http().get("/metrics").text


def test_lines_of_batches_are_counted_and_their_waiting_is_not(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        batch = done(server.client(), [line("a"), line("b"), line("c", temperature=9)])
        assert batch.request_counts.completed == 2
        told = server.http().get("/metrics").text
    for expected in (
        'ttpu:batch_requests_total{model_name="fake",outcome="succeeded"} 2.0',
        'ttpu:batch_requests_total{model_name="fake",outcome="failed"} 1.0',
        'ttpu:batch_requests_running{model_name="fake"} 0.0',
        'ttpu:requests_finished_total{model_name="fake",reason="stop"} 2.0',
    ):
        assert expected in told
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "time_per_output_token"):
        assert f'ttpu:{name}_seconds_count{{model_name="fake"}} 0.0' in told, name


def test_clients_take_turns(bytes_tokenizer: Any) -> None:
    """A client's one line waits for one line of another's twenty."""
    core = FakeCore(bytes_tokenizer, seconds=0.01)
    with running(core, ServerSettings(api_keys=("one", "two"), batch_concurrency=1)) as server:
        first = begun(server.client("one"), jsonl([line(str(number), say="x" * 9) for number in range(20)]))
        until(lambda: server.client("one").batches.retrieve(first.id).request_counts.completed)
        ended(server.client("two"), begun(server.client("two"), jsonl([line("a")])))
        assert server.client("one").batches.retrieve(first.id).request_counts.completed < 15


def test_a_line_waits_for_a_place_in_the_engine(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "AGAIN_SECONDS", 0.02)
    core = FakeCore(bytes_tokenizer, seconds=0.002, max_running=1)
    with running(core) as server:
        assert done(server.client(), [line(str(number)) for number in range(6)]).request_counts.completed == 6


def test_a_line_has_as_long_as_its_batch(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.01), ServerSettings(request_timeout=0.1)) as server:
        assert done(server.client(), [line("a", say="x" * 40)]).request_counts.completed == 1


def test_guides_of_batches_are_compiled_one_after_another(bytes_tokenizer: Any) -> None:
    class SlowGuides(FakeGuides):
        now = most = 0

        def __init__(self) -> None:
            self.lock, self.compiled = threading.Lock(), set[Any]()

        def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> None:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.05)
            with self.lock:
                self.now -= 1
                self.compiled.add(tuple(guided.choice or ()))

        def is_compiled(self, guided: GuidedDecoding) -> bool:
            return tuple(guided.choice or ()) in self.compiled

    core = FakeCore(bytes_tokenizer, guides=SlowGuides())
    with running(core) as server:
        batch = done(server.client(), [line(str(number), guided_choice=[f"yes {number}"]) for number in range(4)])
        assert batch.request_counts.completed == 4
        told = answers(server.client(), batch.output_file_id)["0"]["response"]["body"]
    assert told["choices"][0]["message"]["content"] == "yes 0"
    assert core.guides.most == 1 and len(core.guides.compiled) == 4


def test_as_many_batches_as_a_client_may_have(bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MOST_OPEN", 2)
    monkeypatch.setattr(manager, "MOST_BATCHES", 3)
    core = FakeCore(bytes_tokenizer, seconds=0.01)
    with running(core, ServerSettings(api_keys=("one", "two"))) as server:
        client = server.client("one")
        long = jsonl([line("a", say="x" * 200)])
        oldest = begun(client, long)
        ended_first = done(client, [line("a")])
        second = begun(client, long)
        with pytest.raises(openai.RateLimitError):
            begun(client, jsonl([line("a")]))
        assert done(server.client("two"), [line("a")]).status == "completed"
        client.batches.cancel(second.id)
        ended(client, second)
        client.batches.retrieve(ended_first.id)
        begun(client, jsonl([line("a")]))
        assert client.batches.retrieve(oldest.id).status == "in_progress", "only what has ended is forgotten"
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(ended_first.id)


def test_an_output_that_does_not_fit_ends_its_batch(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_files_bytes=6_000, batch_concurrency=1)) as server:
        client = server.client()
        batch = done(client, [line(str(number)) for number in range(20)])
        assert batch.status == "failed" and [error.code for error in batch.errors.data] == ["storage_full"]
        kept = answers(client, batch.output_file_id)
        assert 0 < batch.request_counts.completed == len(kept) < 20
        assert sum(file.bytes for file in client.files.list()) <= 6_000


def test_a_batch_that_the_server_leaves_says_so_and_keeps_what_is_done(bytes_tokenizer: Any, tmp_path: Path) -> None:
    core = FakeCore(bytes_tokenizer, seconds=0.01)
    settings = ServerSettings(files_dir=str(tmp_path / "kept"), drain_timeout=5, batch_concurrency=2, api_keys=("key",))
    with running(core, settings) as server:
        client = server.client("key")
        earlier = done(client, [line("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
        batch = begun(client, jsonl([line(str(number), say="x" * 20) for number in range(50)]))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        with pytest.raises(RequestError, match="another server"), running(FakeCore(bytes_tokenizer), settings):
            pass
        server.stop()
        server.thread.join(10)
        assert not core.aborted, "lines that ran have ended"
    with running(FakeCore(bytes_tokenizer), settings) as server:
        client = server.client("key")
        left = client.batches.retrieve(batch.id)
        assert left.status == "failed" and left.errors.data[0].code == "server_stopped" and left.failed_at
        kept = answers(client, left.output_file_id)
        assert 0 < left.request_counts.completed == len(kept) < 50 and left.error_file_id is None
        assert client.batches.retrieve(earlier.id) == earlier
        assert set(answers(client, earlier.output_file_id)) == {"a"}
        output = client.files.retrieve(earlier.output_file_id)
        assert output.expires_at == output.created_at + 3600
        assert [one.id for one in client.batches.list()] == [batch.id, earlier.id]
        assert len(list(client.files.list())) == 4
        assert "key" not in "".join(path.read_text() for path in (tmp_path / "kept").rglob("*.json"))
        assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "kept").rglob("*"))


def test_a_batch_whose_server_was_killed_keeps_whole_lines(bytes_tokenizer: Any, tmp_path: Path) -> None:
    folder, copy = tmp_path / "files", tmp_path / "copy"
    core = FakeCore(bytes_tokenizer, seconds=0.005)
    with running(core, ServerSettings(files_dir=str(folder), batch_concurrency=1)) as server:
        client = server.client()
        lines = [line("bad", temperature=9), *(line(str(number), say="x" * 20) for number in range(50))]
        batch = begun(client, jsonl(lines))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        shutil.copytree(folder, copy)
        client.batches.cancel(batch.id)
    state = json.loads((copy / "batches" / f"{batch.id}.json").read_text())
    with (copy / "files" / f"{state['output_id']}.jsonl").open("ab") as output:
        output.write(b'{"custom_id": "torn')
    (copy / "files" / "file-arriving.jsonl").write_bytes(b"half an upload")
    (copy / "batches" / "damaged.json").write_text("{")
    with running(FakeCore(bytes_tokenizer), ServerSettings(files_dir=str(copy))) as server:
        client = server.client()
        left = client.batches.retrieve(batch.id)
        assert left.status == "failed" and left.errors.data[0].code == "server_stopped"
        kept = answers(client, left.output_file_id)
        assert left.request_counts.completed == len(kept) >= 2 and left.request_counts.failed == 1
        assert set(answers(client, left.error_file_id)) == {"bad"}
        assert not (copy / "files" / "file-arriving.jsonl").exists()


def test_a_line_that_waits_for_a_place_does_not_hold_up_the_end(
    bytes_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "AGAIN_SECONDS", 60)
    with running(FakeCore(bytes_tokenizer, max_running=0), ServerSettings(files_dir=str(tmp_path))) as server:
        batch = begun(server.client(), jsonl([line("a")]))
        until(lambda: server.client().batches.retrieve(batch.id).status == "in_progress")
    state = json.loads((tmp_path / "batches" / f"{batch.id}.json").read_text())
    assert state["status"] == "failed" and state["problems"][0]["code"] == "server_stopped"


def test_a_dead_engine_fails_its_batches(bytes_tokenizer: Any, tmp_path: Path) -> None:
    settings = ServerSettings(files_dir=str(tmp_path))
    with running(FakeCore(bytes_tokenizer, fail_at=5), settings) as server:
        batch = begun(server.client(), jsonl([line("a", say="x" * 50)]))
        assert ended(server.client(), batch).errors.data[0].code == "engine_dead"


def test_the_limits_are_those_of_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
    limits, mib = ServerSettings(), 2**20
    sizes = f"{limits.max_files_bytes / mib:,.0f} MiB and {limits.max_files:,} files"
    assert f"an upload of {limits.max_file_bytes / mib:g} MiB (`--max-file-mib`), {sizes}" in text
    assert f"{limits.max_batch_requests:,} lines of a batch" in text
    assert f"{manager.MOST_OPEN} batches that have not ended, and {manager.MOST_BATCHES:,} that" in text
    assert f"{middleware.MOST_UPLOADS_OF_CLIENT} at once of a client and {middleware.MOST_UPLOADS} of all" in text
    assert mib == middleware.UPLOAD_RATE and "a second for each MiB beyond the minute" in text
    assert f"`errors` names the line ({batch_lines.MOST_PROBLEMS} at most)" in text
    assert BACKGROUND_PRIORITY * SchedulerConfig.aging_seconds == 3600, "waited for an hour"
    assert manager.WINDOW_SECONDS == 24 * 3600


def test_slots_are_taken_in_turn_and_given_back_by_who_leaves() -> None:
    async def run() -> list[str]:
        slots, order = FairSlots(1), []

        async def one(owner: str) -> None:
            await slots.take(owner)
            order.append(owner)
            await asyncio.sleep(0)
            slots.give_back()

        await slots.take("first")
        tasks = [asyncio.create_task(one(owner)) for owner in "aaabbc"]
        leaving = asyncio.create_task(one("d"))
        late = asyncio.create_task(one("e"))
        await asyncio.sleep(0)
        leaving.cancel()
        slots.give_back()
        late.cancel()
        await asyncio.gather(*tasks, leaving, late, return_exceptions=True)
        assert slots.taken == 0
        holder = asyncio.create_task(one("x"))
        await holder
        await slots.take("y")
        given = asyncio.create_task(slots.take("z"))
        await asyncio.sleep(0)
        slots.give_back()
        given.cancel()  # in the moment in which it got its slot
        await asyncio.gather(given, return_exceptions=True)
        assert slots.taken == 0
        return order

    assert asyncio.run(run())[:6] == ["a", "b", "c", "a", "b", "a"]


def test_who_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def run() -> None:
        slots = FairSlots(1)
        await slots.take("holder")
        leaving, staying = (asyncio.create_task(slots.take(owner)) for owner in ("a", "b"))
        await asyncio.sleep(0)
        leaving.cancel()
        slots.give_back()
        await asyncio.wait_for(staying, 5)
        await asyncio.wait([leaving])
        assert leaving.cancelled() and slots.taken == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "body", "sequences"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 3}, 6),
        ("/v1/embeddings", {"input": ["x", "y"]}, 2),
        ("/v1/responses", {"input": "x"}, 1),
        ("/v1/score", {"text_1": "x", "text_2": ["y", "z"]}, 3),
        ("/rerank", {"query": "x", "documents": ["y", "z", "x"]}, 4),
    ],
)
def test_a_line_takes_the_room_of_its_sequences(url: str, body: Any, sequences: int) -> None:
    endpoint = ENDPOINTS[url]
    assert endpoint.sequences(endpoint.body.model_validate({"model": "fake", **body})) == sequences


def test_the_usage_of_a_batch_adds_up_that_of_all_endpoints() -> None:
    usage = Usage()
    usage.add({"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}})
    usage.add(
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "input_tokens_details": {"cached_tokens": 40},
            "output_tokens_details": {"reasoning_tokens": 7},
        }
    )
    usage.add({"prompt_tokens": 1})
    usage.add({})
    usage.add(None)
    assert usage == Usage(input=111, cached=44, output=22, reasoning=7)
    assert usage.as_json()["total_tokens"] == 133


def test_room_is_for_sequences() -> None:
    async def run() -> None:
        room, inside, most = Room(4), 0, 0

        async def one(sequences: int) -> None:
            nonlocal inside, most
            async with room.taken(sequences):
                inside += min(sequences, 4)
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= min(sequences, 4)

        tasks = [asyncio.create_task(one(number)) for number in (1, 3, 4, 100, 2, 1, 1, 0)]
        leaving = [asyncio.create_task(one(2)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        await asyncio.wait(leaving)
        assert most == 4 and all(task.cancelled() for task in leaving)
        async with asyncio.timeout(1), room.taken(4):
            pass
        async with asyncio.timeout(1), room.taken(3):
            large, small = asyncio.create_task(one(2)), asyncio.create_task(one(1))
            await asyncio.sleep(0)
            large.cancel()
            await small  # which waited behind the one that left

    asyncio.run(run())
