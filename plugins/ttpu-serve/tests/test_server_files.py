"""/v1/files, asked by OpenAI's own client over a socket, and by clients that mean harm."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from batch_cases import jsonl, line, upload
from fake_core import FakeCore
from serving import Running, running, until
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.errors import RequestError
from ttpu_serve.server import ServerSettings, middleware
from ttpu_serve.server.batches import file_store
from ttpu_serve.server.batches import upload as form_reader
from ttpu_serve.server.batches.file_store import FileStore
from ttpu_serve.server.errors import ApiError

openai = pytest.importorskip("openai")

SETTINGS = ServerSettings(
    api_keys=("secret", "other", "full"), max_concurrent=3, max_file_bytes=100_000, max_files_bytes=250_000, max_files=9
)
KEY = {"authorization": "Bearer full"}


@pytest.fixture(scope="module")
def server(bytes_tokenizer: Any) -> Iterator[Running]:
    with running(FakeCore(bytes_tokenizer), SETTINGS) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    client = server.client("secret")
    yield client
    for file in client.files.list():
        client.files.delete(file.id)


def folder_of(server: Running) -> Path:
    return server.server.config.app.state.files.folder / "files"


def test_a_file_is_described_read_and_deleted(server: Running, client: Any) -> None:
    content = jsonl([line("ü")])
    before = int(time.time())
    file = upload(client, content, "../../so me\u202e“name”.jsonl")
    assert (file.object, file.purpose, file.status, file.bytes) == ("file", "batch", "processed", len(content))
    assert before <= file.created_at <= time.time() and file.expires_at is None
    assert file.filename == "so me“name”.jsonl"
    assert client.files.retrieve(file.id) == file and client.files.list().data == [file]
    assert client.files.content(file.id).read() == content
    told = server.http(headers={"x-api-key": "secret"}).get(f"/v1/files/{file.id}/content")
    assert told.headers["content-type"] == "application/jsonl" and told.headers["x-content-type-options"] == "nosniff"
    assert told.headers["content-disposition"] == f'attachment; filename="{file.id}.jsonl"'
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)
    assert not list(folder_of(server).iterdir())


def test_files_belong_to_their_key(server: Running, client: Any) -> None:
    file = upload(client, b"{}")
    other = server.client("other")
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file.id)
    assert other.files.list().data == []
    assert server.http().get(f"/v1/files/{file.id}").status_code == 401
    assert client.files.list().data == [file]


def test_files_are_listed_in_pages(server: Running, client: Any) -> None:
    made = [upload(client, b"{}", str(number)).id for number in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == made[::-1], "the client asks for all pages"
    assert [file.id for file in client.files.list(order="asc", limit=2, after=made[1])] == made[2:]
    http = server.http(headers={"x-api-key": "secret"})
    page = http.get("/v1/files", params={"limit": 4, "order": "asc"}).json()
    assert page["has_more"] and (page["first_id"], page["last_id"]) == (made[0], made[3])
    page = http.get("/v1/files", params={"limit": 4, "order": "asc", "after": made[3]}).json()
    assert not page["has_more"] and [file["id"] for file in page["data"]] == [made[4]]
    assert not http.get("/v1/files", params={"limit": 5}).json()["has_more"]
    assert client.files.list(purpose="batch_output").data == []
    assert len(client.files.list(purpose="batch").data) == 5
    for query in ("limit=0", "limit=10001", "order=up", "after=file-none"):
        refused = http.get(f"/v1/files?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == query.partition("=")[0]


def test_a_file_expires(server: Running, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch", expires_after=expires)
    assert file.expires_at == file.created_at + 3600
    monkeypatch.setattr(file_store.time, "time", lambda: file.created_at + 3599.0)
    client.files.retrieve(file.id)
    monkeypatch.setattr(file_store.time, "time", lambda: file.created_at + 3601.0)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert not list(folder_of(server).iterdir())


FILE = ("in.jsonl", b"{}")


@pytest.mark.parametrize(
    ("files", "data", "status", "param"),
    [
        ([("file", FILE)], {}, 400, "purpose"),
        ([("file", FILE)], {"purpose": "fine-tune"}, 400, "purpose"),
        ([("other", FILE)], {"purpose": "batch"}, 400, "other"),
        ([("file", FILE), ("file", FILE)], {"purpose": "batch"}, 400, "file"),
        ([("purpose", (None, b"batch"))], {}, 400, "file"),
        ([("file", ("in.jsonl", b""))], {"purpose": "batch"}, 400, "file"),
        ([("file", FILE)], {"purpose": "batch", "purpos": "x"}, 400, "purpos"),
        ([("file", FILE)], {"purpose": "batch", "expires_after[seconds]": "3600"}, 400, "expires_after"),
        ([("file", FILE)], {"purpose": "batch", "expires_after[anchor]": "created_at"}, 400, "expires_after"),
        ([("file", FILE)], {"purpose": "x" * 2000}, 400, None),
        ([("file", FILE)], {"purpose": ["batch", "batch"]}, 400, None),
        ([("file", FILE)], {"purpose": "batch", **{f"x{number}": "y" for number in range(20)}}, 400, None),
        ([("file", ("in" * 3000, b"{}"))], {"purpose": "batch"}, 400, None),
        ([("file", ("in.jsonl", b"x" * 100_001))], {"purpose": "batch"}, 413, "file"),
        ([("file", ("in.jsonl", b"x" * 200_000))], {"purpose": "batch"}, 413, "file"),
        ([("file", ("in.jsonl", b"x" * 2_000_000))], {"purpose": "batch"}, 413, None),
    ],
)
def test_a_form_that_cannot_be_stored_says_why(
    server: Running, files: Any, data: Any, status: int, param: str | None
) -> None:
    refused = server.http(headers=KEY).post("/v1/files", files=files, data=data)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == param and refused.json()["error"]["message"]
    until(lambda: not list(folder_of(server).iterdir()))
    assert server.client("full").files.list().data == []


HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data; boundary=x", PURPOSE + HEAD + b"{}\r\n--x--\r\n", 200),
        ('Multipart/Form-Data; boundary="x"', HEAD + b"{}\r\n" + PURPOSE + b"--x--", 200),
        ("multipart/form-data; boundary=x", HEAD + b"{}\n" * 3000 + b"\r\n" + PURPOSE + b"--x--", 200),
        ("multipart/form-data; boundary=x", PURPOSE + HEAD + b"{}", 400),
        ("multipart/form-data; boundary=x", PURPOSE + HEAD + b"{}\r\n--x", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"\0" * 1000, 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 2000, 400),
        ("multipart/form-data; boundary=x", b"--x\r\nA\0\xff: b\r\n\r\n\r\n--x--", 400),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--x--", 400),
        ("multipart/form-data", PURPOSE, 415),
        ("application/json", b"{}", 415),
        ("application/json", b"x" * 150_000, 415),
        ("application/x-www-form-urlencoded", b"purpose=batch", 415),
        ("", b"x", 415),
    ],
)
def test_a_body_that_is_no_form_is_refused(server: Running, client: Any, kind: str, body: bytes, status: int) -> None:
    headers = {"authorization": "Bearer secret", "content-type": kind}
    answer = server.http().post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert len(client.files.list().data) == (status == 200)


def test_so_many_files_and_bytes_of_a_client_are_kept(server: Running) -> None:
    client, other = server.client("full"), server.client("other")
    made = [upload(client, b"x" * 100_000) for _ in range(2)]
    for size, fits in ((50_001, False), (50_000, True), (1, False)):
        if fits:
            made.append(upload(client, b"x" * size))
            continue
        with pytest.raises(openai.APIStatusError) as refusal:
            upload(client, b"x" * size)
        assert refusal.value.status_code == 413 and refusal.value.code == "storage_full"
    assert len(list(folder_of(server).iterdir())) == 6, "content and description of each"
    other.files.delete(upload(other, b"x" * 100_000).id)
    for file in made:
        client.files.delete(file.id)
    made = [upload(client, b"x") for _ in range(9)]
    with pytest.raises(openai.APIStatusError, match="9 files"):
        upload(client, b"x")
    for file in made:
        client.files.delete(file.id)


def test_a_file_may_have_as_many_bytes_as_said(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(max_file_bytes=1000)) as server:
        client = server.client()
        assert upload(client, b"{}\n".ljust(1000)).bytes == 1000
        with pytest.raises(openai.APIStatusError) as refusal:
            upload(client, b"{}\n".ljust(1001))
        assert refusal.value.status_code == 413 and refusal.value.param == "file"


def test_the_heads_of_a_form_have_a_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parser's own is, which its older releases do not have."""
    monkeypatch.setattr(form_reader, "MOST_HEADER_BYTES", 200)
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("x" * 200, b"{}")}}
    refused = server.http(headers=KEY).post("/v1/files", **form)
    assert refused.status_code == 400 and "200 bytes of headers" in refused.json()["error"]["message"]


def test_a_disk_that_is_full_is_told(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "path", lambda self, name: Path("/dev/full"))
    monkeypatch.setattr(FileStore, "_remove", lambda self, name: None)
    refused = server.http(headers=KEY).post("/v1/files", files={"file": FILE}, data={"purpose": "batch"})
    assert refused.status_code == 507 and "No space left" in refused.json()["error"]["message"]
    monkeypatch.undo()
    assert not arriving_in(server) and server.client("full").files.list().data == []


def connected(server: Running, head: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10)
    client.sendall(head)
    return client


def begun_upload(length: int = 90_000) -> bytes:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer full\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: %d\r\n\r\n" % length
    )
    return head + PURPOSE + HEAD


def test_uploads_that_arrive_hold_no_slot_and_are_so_many(server: Running) -> None:
    held = [connected(server, begun_upload()) for _ in range(middleware.MOST_UPLOADS_OF_CLIENT)]
    try:
        until(lambda: len(arriving_in(server)) == len(held))
        refused = server.http(headers=KEY).post("/v1/files", files={"file": FILE}, data={"purpose": "batch"})
        assert refused.status_code == 429 and refused.headers["retry-after"]
        other = server.client("other")
        other.files.delete(upload(other, b"{}").id)
        asked = {"model": "fake", "prompt": "say: hello", "max_tokens": 5}
        assert server.http(headers=KEY).post("/v1/completions", json=asked).status_code == 200
    finally:
        for client in held:
            client.close()
    until(lambda: not arriving_in(server))
    assert not list(folder_of(server).iterdir()), "what arrived of them is gone"
    client = server.client("full")
    client.files.delete(upload(client, b"{}").id)


def arriving_in(server: Running) -> dict[str, int]:
    store = server.server.config.app.state.files
    return {name: size for files in store._incoming.values() for name, size in files.items()}


def test_a_slow_upload_ends(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "PART_SECONDS", 0.2)
    with connected(server, begun_upload()) as client:
        assert b"408" in client.recv(2**16).partition(b"\r\n")[0]
    monkeypatch.undo()
    monkeypatch.setattr(middleware, "READ_SECONDS", 0.3)
    monkeypatch.setattr(middleware, "UPLOAD_RATE", 100_000)
    for piece, ends in ((b"x", True), (b"x" * 2_000, False)):
        with connected(server, begun_upload()) as client:
            client.settimeout(0.01)
            began, told = time.monotonic(), b""
            while time.monotonic() < began + 0.7 and not told:
                with suppress(TimeoutError):
                    client.sendall(piece)
                    told = client.recv(2**16)
            assert (b"408" in told.partition(b"\r\n")[0]) is ends, "whoever sends fast enough has more time"
    until(lambda: not arriving_in(server))


def test_a_reader_that_stops_reading_is_left(bytes_tokenizer: Any) -> None:
    settings = ServerSettings(write_timeout=0.2, max_concurrent=1)
    with running(FakeCore(bytes_tokenizer), settings) as server:
        file = upload(server.client(), b"x" * 30_000_000)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            reader.sendall(f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: server.http().get("/v1/models").status_code == 429)
            until(lambda: server.http().get("/v1/models").status_code == 200)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://mine.example", "sec-fetch-site": "cross-site"}, 200),
        ({"host": "evil.example"}, 421),
    ],
)
def test_other_sites_pages_store_and_cancel_nothing(bytes_tokenizer: Any, headers: Any, status: int) -> None:
    """A browser sends forms to any site without asking it."""
    with running(FakeCore(bytes_tokenizer), ServerSettings(allowed_origins=("https://mine.example",))) as server:
        http = server.http(headers=headers)
        answer = http.post("/v1/files", files={"file": FILE}, data={"purpose": "batch"})
        assert answer.status_code == status
        cancelled = http.post("/v1/batches/batch_x/cancel").status_code
        assert cancelled == (404 if status == 200 else status)


def test_a_server_that_leaves_takes_no_files_and_no_batches(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer, seconds=0.01)) as server:
        client = server.client()
        file = upload(client, jsonl([line("a")]))
        stream = iter(client.completions.create(model="fake", prompt="x" * 100, stream=True))
        next(stream)
        server.stop()
        until(lambda: not server.engine.accepting)
        for ask in (
            lambda: upload(client, b"x" * 100_000),
            lambda: client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.InternalServerError) as refusal:
                ask()
            assert refusal.value.code == "shutting_down"
        assert client.files.retrieve(file.id) == file, "what is there can be read"


def test_a_server_without_batches_has_none(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer), ServerSettings(batches=False)) as server:
        http = server.http()
        assert http.post("/v1/files", files={"file": FILE}, data={"purpose": "batch"}).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert http.get(path).status_code == 404
            assert path not in http.get("/openapi.json").json()["paths"]


def test_the_options_of_the_command_are_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServerSettings] = []
    monkeypatch.setattr("ttpu_serve.cli.serve._app", lambda name, settings, *_: given.append(settings))
    monkeypatch.setattr("ttpu_serve.server.run.run", lambda *_, **__: None)
    llama, folder = str(tiny.llama_checkpoint(tmp_path / "llama")), tmp_path / "kept"
    options = ["--files-dir", str(folder), "--max-file-mib", "0.5", "--max-files-mib", "2", "--max-files", "3"]
    options += ["--max-batch-requests", "4", "--batch-concurrency", "5"]
    for words in ([], options, ["--no-batches", "--files-dir", str(tmp_path / "none")]):
        assert CliRunner().invoke(app, ["serve", llama, "--port", "0", *words]).exit_code == 0
    plain, full, none = given
    defaults = ServerSettings()
    for name in ("batches", "files_dir", "max_file_bytes", "max_files_bytes", "max_files", "max_batch_requests"):
        assert getattr(plain, name) == getattr(defaults, name), name
    assert (full.files_dir, full.max_file_bytes, full.max_files_bytes) == (str(folder), 2**19, 2**21)
    assert (full.max_files, full.max_batch_requests, full.batch_concurrency) == (3, 4, 5)
    assert folder.is_dir() and not none.batches and not (tmp_path / "none").exists()


def test_a_temporary_folder_is_private_and_goes_with_the_server(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        assert server.server.config.app.state.files._folder is None, "none is made before it is needed"
        upload(server.client(), b"{}")
        folder = folder_of(server).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in folder_of(server).iterdir()] == [0o600, 0o600]
        described = server.http().get("/openapi.json").json()["paths"]["/v1/files"]["post"]["requestBody"]
        schema = described["content"]["multipart/form-data"]["schema"]
        assert schema["required"] == ["file", "purpose"]
    assert not folder.exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(RequestError, match="other users"):
        FileStore(str(tmp_path), 1000, 10)
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be"):
        FileStore(str(tmp_path / "file"), 1000, 10)
    store = FileStore(str(tmp_path / "made" / "here"), 1000, 10)
    with pytest.raises(RequestError, match="another server"):
        FileStore(str(tmp_path / "made" / "here"), 1000, 10)
    store.close()
    FileStore(str(tmp_path / "made" / "here"), 1000, 10).close()


def test_a_store_reads_what_it_kept_and_not_what_is_damaged(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 1000, 10)
    for name in ("one", "two", "three"):
        file = store.begin("me")
        file.write(name.encode())
        file.finish(name, "batch")
    cut, wrong = (path for path in sorted((tmp_path / "files").glob("*.jsonl")) if path.read_bytes() != b"one")
    os.truncate(cut, 1)
    wrong.with_suffix(".json").write_text(json.dumps({"id": wrong.stem}))
    store.close()
    store = FileStore(str(tmp_path), 1000, 10)
    assert [file.filename for file in store.list("me")] == ["one"]
    store.forget_others()
    assert len(list((tmp_path / "files").iterdir())) == 2
    store.close()


def test_bytes_count_while_they_arrive() -> None:
    store = FileStore(None, 100, 10)
    first, second = store.begin("me"), store.begin("me")
    first.write(b"x" * 60)
    with pytest.raises(ApiError, match="60 bytes"):
        second.write(b"x" * 41)
    second.write(b"x" * 40)
    first.discard()
    second.write(b"x" * 60)
    assert store.list("me") == []
    assert second.finish("a", "batch").bytes == 100
    threading.Thread(target=second.discard).run()
    assert [file.bytes for file in store.list("me")] == [100]
    folder = store.folder
    store.close()
    assert not folder.exists()
