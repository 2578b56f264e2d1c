"""`ttpu batch` answers the requests of a file, whole or not at all, and goes on where it was interrupted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from batch_cases import jsonl, line
from fake_core import FakeCore
from typer.testing import CliRunner, Result

from ttpu_core.cli.main import app
from ttpu_core.errors import RequestError
from ttpu_serve.server.batches.offline import OfflineWork

Run = Callable[..., Result]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twelve requests, of which one is refused."""
    path = tmp_path / "in.jsonl"
    lines = [line(str(number), say=f"answer {number}") for number in range(11)]
    path.write_bytes(jsonl([*lines[:5], line("bad", temperature=9), *lines[5:]]))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def run(source: Path, output: Path, bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with a core that answers without a model."""
    checkpoint = str(tiny.llama_checkpoint(source.parent / "llama"))

    def run(*options: str, core: FakeCore | None = None, source: Path = source, output: Path = output) -> Result:
        core = core or FakeCore(bytes_tokenizer)
        monkeypatch.setattr("ttpu_serve.cli.batch.opened", lambda *_, **__: core)
        return CliRunner().invoke(app, ["batch", checkpoint, "-i", str(source), "-o", str(output), *options])

    return run


def told(path: Path) -> list[Any]:
    return [json.loads(one) for one in path.read_bytes().splitlines()]


def names(path: Path) -> list[str]:
    return [one["custom_id"] for one in told(path)]


def test_answers_come_in_the_order_of_the_requests(run: Run, source: Path, output: Path) -> None:
    output.write_text("what was there before")
    done = run("--json")
    assert done.exit_code == 0, done.output
    assert names(output) == names(source)
    answers = {one["custom_id"]: one for one in told(output)}
    assert answers["7"]["response"]["body"]["choices"][0]["message"]["content"] == "answer 7"
    assert answers["7"]["error"] is None and answers["7"]["response"]["status_code"] == 200
    assert answers["bad"]["response"]["body"]["error"]["param"] == "temperature"
    summary = json.loads(done.stdout)
    assert {name: summary[name] for name in ("requests", "succeeded", "failed", "resumed")} == {
        "requests": 12, "succeeded": 11, "failed": 1, "resumed": 0
    }  # fmt: skip
    usage = [one["response"]["body"]["usage"] for one in answers.values() if one["custom_id"] != "bad"]
    assert summary["usage"]["output_tokens"] == sum(one["completion_tokens"] for one in usage)
    assert sorted(path.name for path in output.parent.glob("*.jsonl*")) == ["in.jsonl", "out.jsonl"]
    assert output.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_interrupted_run_leaves_no_output_and_is_gone_on_with(
    run: Run, source: Path, output: Path, bytes_tokenizer: Any
) -> None:
    partial = output.with_name("out.jsonl.partial")
    dying = FakeCore(bytes_tokenizer, fail_at=40)
    done = run("--concurrency", "1", core=dying)
    assert done.exit_code == 2 and "on fire" in done.stderr, done.output
    kept = [one["custom_id"] for one in told(partial)]
    assert 2 <= len(kept) < 12 and not output.exists()
    assert f"{len(kept)} of 12 answers are in {partial}" in done.stderr
    refused = run()
    assert refused.exit_code == 2 and "--resume" in refused.stderr and partial.exists()
    with partial.open("ab") as file:
        file.write(b'{"custom_id": "torn')
    done = run("--resume", "--concurrency", "1", core=FakeCore(bytes_tokenizer, fail_at=30))
    assert done.exit_code == 2
    kept = [one["custom_id"] for one in told(partial)]
    core = FakeCore(bytes_tokenizer)
    done = run("--resume", "--json", core=core)
    assert done.exit_code == 0, done.output
    answered = len(set(kept) - {"bad"})
    assert json.loads(done.stdout)["resumed"] == answered and len(core.seen) == 11 - answered
    assert names(output) == names(source) and not partial.exists()


def test_that_there_is_nothing_to_go_on_with_is_said(run: Run, output: Path) -> None:
    assert "warning" not in run().stderr
    again = run("--resume")
    assert again.exit_code == 0, again.output
    partial = output.with_name("out.jsonl.partial")
    assert f"warning: --resume was given, but there is no {partial} to go on with" in again.stderr
    assert f"all requests are answered anew, and {output} is replaced" in again.stderr


def test_answers_of_another_input_are_not_gone_on_with(run: Run, output: Path) -> None:
    partial = output.with_name("out.jsonl.partial")
    for content, said in (
        (jsonl([{"custom_id": "else", "response": {"status_code": 200}}]), "of another input"),
        (b"my notes\n", "other things"),
    ):
        partial.write_bytes(content)
        refused = run("--resume")
        assert refused.exit_code == 2 and said in refused.stderr and partial.read_bytes() == content


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (jsonl([line("a"), line("a")]), "line 2: the custom_id 'a'"),
        (jsonl([line("a")]) + b"no\nno\n", "correct it. 1 more lines are wrong."),
        (jsonl([line("a", "/v1/audio")]), "url is '/v1/audio'"),
        (b"", "in.jsonl: the file has no lines"),
        (b"\n\n", "in.jsonl: the file has no lines"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_refused_before_a_model_is_loaded(
    run: Run, source: Path, output: Path, lines: bytes, said: str
) -> None:
    source.write_bytes(lines)
    refused = run(core=None)
    assert refused.exit_code == 2 and said in refused.stderr and refused.stderr.count("\n") == 1
    assert sorted(path.name for path in output.parent.glob("*.jsonl*")) == ["in.jsonl"]


def test_files_that_cannot_be_used_are_refused(run: Run, source: Path, output: Path, tmp_path: Path) -> None:
    for options, said in (
        ({"source": tmp_path / "none"}, "requests were to be read from"),
        ({"output": tmp_path}, "it is a folder or the input"),
        ({"output": source}, "it is a folder or the input"),
        ({"output": tmp_path / "none" / "out"}, "answers were to be written to"),
        ({"source": "https://example.org/in.jsonl"}, "files of this machine"),
    ):
        refused = run(**options)
        assert refused.exit_code == 2 and said in refused.stderr, refused.output


def test_the_status_says_whether_anything_succeeded(run: Run, source: Path, output: Path) -> None:
    source.write_bytes(jsonl([line("a", temperature=9)]))
    done = run()
    assert done.exit_code == 1 and "0 answered, 1 failed" in done.stdout and len(told(output)) == 1
    source.write_bytes(jsonl([line("a", temperature=9), line("b", "/v1/completions", model="gpt-4", prompt="say: hi")]))
    done = run("--served-model-name", "gpt-4", "--disable-log-requests")
    assert done.exit_code == 0 and "1 answered, 1 failed" in done.stdout
    assert "--disable-log-requests has no effect" in done.stderr
    assert told(output)[1]["response"]["body"]["choices"][0]["text"] == "hi"


def test_so_many_are_worked_on_at_once(run: Run, output: Path, bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer, seconds=0.005)
    core.scheduler = replace(core.scheduler, config=replace(core.scheduler.config, max_num_seqs=2))
    most, step, until = 0, core.step, time.monotonic() + 30

    def noting() -> Any:
        """Answer nothing before four are asked for, however slowly they are read."""
        nonlocal most
        most = max(most, len(core.outputs))
        if most < 4 and time.monotonic() < until:
            time.sleep(0.001)
            return []
        return step()

    core.step = noting  # type: ignore[method-assign]
    assert run(core=core).exit_code == 0 and most == 4


def test_work_that_fails_before_it_begins_leaves_nothing(source: Path, output: Path) -> None:
    with pytest.raises(RequestError), OfflineWork(source, output, resume=False):
        raise RequestError("the model cannot be loaded: try another.")
    assert not output.with_name("out.jsonl.partial").exists()
    with OfflineWork(source, output, resume=True) as work:
        assert (work.total, work.resumed) == (12, 0)


@pytest.mark.slow
def test_a_model_answers(tmp_path: Path) -> None:
    """The same prompt gives the same text, alone or in company, in a chat or not."""
    checkpoint = tiny.llama_checkpoint(tmp_path / "tiny-llama", max_position_embeddings=128)
    asked = {"model": "tiny-llama", "max_tokens": 8, "temperature": 0}
    lines = [line(str(number), "/v1/completions", prompt="x" * (1 + number % 2), **asked) for number in range(6)]
    lines.append(line("v", "/v1/embeddings", model="tiny-llama", input=["a", "b"]))
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    output = tmp_path / "out.jsonl"
    size = ("--max-model-len", "64", "--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--guides", "off")
    command = ["batch", str(checkpoint), "-i", str(tmp_path / "in.jsonl"), "-o", str(output), *size, "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    bodies = [one["response"]["body"] for one in told(output)]
    texts = [body["choices"][0]["text"] for body in bodies[:6]]
    assert texts == texts[:2] * 3 and [body["usage"]["prompt_tokens"] for body in bodies[:2]] == [1, 2]
    assert len(bodies[6]["data"]) == 2
