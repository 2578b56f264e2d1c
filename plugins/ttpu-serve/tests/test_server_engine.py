"""`ttpu serve` as a process of its own over a tiny random llama: the whole way from the command line to tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from batch_cases import CHAT, answers, done, line
from devices import xla_flags
from serving import until
from torchless import torchless
from typer.testing import CliRunner

from ttpu_core.cli.main import app

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

openai = pytest.importorskip("openai")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }} {% endfor %}"
)
OPTIONS = (
    *("--port", "0", "--max-model-len", "384", "--max-num-seqs", "3", "--max-num-batched-tokens", "32"),
    *("--speculative", "ngram:2", "--enable-admin", "--chat-template", TEMPLATE, "--max-logprobs", "24"),
)
HELLO: Any = [{"role": "user", "content": "hello"}]


@dataclass
class Process:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self) -> Any:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=60)

    def stats(self) -> Any:
        """The engine's counters."""
        return httpx.get(f"{self.url}/stats", timeout=30).json()["engine"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.llama_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama", max_position_embeddings=512)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.0, "top_k": 50}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("log") / "server.log"  # a pipe that nobody reads would stop it
    command = [sys.executable, "-m", "ttpu_core.cli.main", "serve", str(checkpoint), *OPTIONS]
    environment = torchless({**os.environ, "TTPU_API_KEY": "secret", "XLA_FLAGS": xla_flags(1)})
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"serving (\S+) at (http://127\.0\.0\.1:\d+) ", process.stdout.readline())
        assert found, log.read_text()
        yield Process(process, found[2], log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.communicate()


def test_an_answer_is_the_same_streamed_and_whole_alone_and_in_company(server: Process) -> None:
    client = server.client()
    asked = {"model": "tiny-llama", "messages": HELLO, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens == 20 and whole.choices[0].finish_reason == "length"
    others = [
        client.completions.create(model="tiny-llama", prompt="x" * n, max_tokens=60, stream=True) for n in (3, 40)
    ]
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    for other in others:
        other.close()


def test_log_probabilities_are_those_of_the_greedy_path(server: Process) -> None:
    answer = server.client().chat.completions.create(
        model="tiny-llama", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.bytes == entry.top_logprobs[0].bytes and entry.logprob == entry.top_logprobs[0].logprob
        assert sorted((top.logprob for top in entry.top_logprobs), reverse=True) == [
            top.logprob for top in entry.top_logprobs
        ]


def test_as_many_log_probabilities_are_told_as_the_server_was_started_for(server: Process) -> None:
    client = server.client()
    asked: Any = {"model": "tiny-llama", "max_tokens": 1}
    named: Any = {"return_tokens_as_token_ids": True}  # several tokens have the same text
    told = client.completions.create(prompt="Hi", logprobs=24, extra_body=named, **asked).choices[0].logprobs
    assert len(told.top_logprobs[0]) == 24
    with pytest.raises(openai.BadRequestError, match="logprobs is 25, but this engine reports at most 24") as refused:
        client.completions.create(prompt="Hi", logprobs=25, **asked)
    assert refused.value.param == "logprobs"
    chat = {"messages": HELLO, "logprobs": True, **asked}
    told = client.chat.completions.create(top_logprobs=24, **chat).choices[0].logprobs
    assert len(told.content[0].top_logprobs) == 24
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 25, but this engine") as refused:
        client.chat.completions.create(top_logprobs=25, **chat)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is 25") as refused:
        client.completions.create(prompt="Hi", extra_body={"prompt_logprobs": 25}, **asked)
    assert refused.value.param == "prompt_logprobs"


def test_a_prompt_scored_by_echo_is_scored_as_it_is_generated(server: Process) -> None:
    client = server.client()
    asked = {"model": "tiny-llama", "logprobs": 0}
    said = client.completions.create(prompt="Hi", max_tokens=4, extra_body={"return_token_ids": True}, **asked)
    ids = [*b"Hi", *said.choices[0].token_ids]
    scored = client.completions.create(prompt=ids, max_tokens=0, echo=True, **asked)
    expected = said.choices[0].logprobs.token_logprobs
    assert len(expected) == 4 and scored.choices[0].logprobs.token_logprobs[2:] == pytest.approx(expected, abs=2e-4)


def test_an_answer_matches_its_schema(server: Process) -> None:
    schema = {
        "type": "object",
        "properties": {"fine": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
        "required": ["fine", "size"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    answer = server.client().chat.completions.create(
        model="tiny-llama", messages=HELLO, max_tokens=100, response_format=form, seed=3, temperature=1
    )
    told = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop" and isinstance(told["fine"], bool) and told["size"] in ("s", "m")
    choices = {"guided_choice": ["maybe", "never"]}
    answer = server.client().chat.completions.create(model="tiny-llama", messages=HELLO, extra_body=choices)
    assert answer.choices[0].message.content in choices["guided_choice"]


def test_a_tool_that_must_be_called_is_called(server: Process) -> None:
    parameters = {
        "properties": {"unit": {"$ref": "#/$defs/unit"}},
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "heat", "parameters": parameters}}]
    asked: Any = {"model": "tiny-llama", "messages": HELLO, "tools": tools, "seed": 3, "temperature": 1}
    asked["extra_body"] = {
        "logit_bias": {str(byte): -100 for byte in b" \t\r\n"}
    }  # or a random model breaks lines for long
    for choice in ("required", {"type": "function", "function": {"name": "heat"}}):
        answer = server.client().chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **asked)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "heat" and json.loads(call.function.arguments)["unit"] in ("C", "F")
        asked_again = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        with server.client().chat.completions.stream(**asked_again) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments


def test_a_schema_that_is_none_is_refused(server: Process) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "wizard"}}}
    with pytest.raises(openai.BadRequestError):
        server.client().chat.completions.create(model="tiny-llama", messages=HELLO, response_format=form)


def test_rules_that_forbid_everything_are_the_requests_fault(server: Process) -> None:
    rules = {"guided_choice": ["yes", "no"], "allowed_token_ids": [ord("x")], "min_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        server.client().chat.completions.create(model="tiny-llama", messages=HELLO, extra_body=rules)


def test_a_seed_repeats_an_answer(server: Process) -> None:
    asked = {"model": "tiny-llama", "messages": HELLO, "max_tokens": 12, "temperature": 1.0, "n": 2}
    answers = [server.client().chat.completions.create(seed=seed, **asked) for seed in (5, 5, 6)]
    said = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert said[0] == said[1] != said[2] and said[0][0] != said[0][1]


def test_embeddings_have_length_one_and_differ(server: Process) -> None:
    told = server.client().embeddings.create(model="tiny-llama", input=["one", "two"])
    vectors = [one.embedding for one in told.data]
    assert all(sum(value**2 for value in vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
    assert len(vectors[0]) == 32 and vectors[0] != vectors[1]


def test_pages_come_back_when_clients_leave(server: Process) -> None:
    client = server.client()
    streams = [
        client.completions.create(model="tiny-llama", prompt="abc", max_tokens=100, stream=True, n=2) for _ in range(3)
    ]
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    until(lambda: server.stats()["running"] == server.stats()["waiting"] == 0)
    assert set(server.stats()["pages_in_use"].values()) == {0}


def test_metrics_tell_what_was_done(server: Process) -> None:
    http = httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=60)
    asked = {"model": "tiny-llama", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    asked |= {"stream": True, "ignore_eos": True}
    assert "[DONE]" in http.post("/v1/chat/completions", json=asked).text
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(re.findall(r"^(ttpu:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    assert float(values["ttpu:generation_tokens_total"]) > 20 and float(values["ttpu:draft_tokens_total"]) > 0
    assert float(values["ttpu:time_to_first_token_seconds_count"]) > 0
    assert float(values["ttpu:time_per_output_token_seconds_count"]) > 0
    assert float(values["ttpu:recompiles_total"]) == 0, "every program was compiled before the server was ready"


def test_the_engine_sleeps_and_goes_on(server: Process) -> None:
    http = httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=60)
    asked = {"model": "tiny-llama", "messages": HELLO, "max_tokens": 5}
    before = http.post("/v1/chat/completions", json=asked).json()["choices"]
    assert http.post("/sleep").status_code == 200
    assert http.get("/stats").json()["engine"]["asleep"]
    assert http.post("/sleep").status_code == http.post("/reset_prefix_cache").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/v1/chat/completions", json=asked)
        until(lambda: server.stats()["waiting"] == 1)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up").status_code == 200
        assert waiting.result(30).json()["choices"] == before
    assert http.post("/v1/chat/completions", json=asked).json()["choices"] == before


def test_a_batch_has_the_answers_of_its_endpoint(server: Process) -> None:
    client = server.client()
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["yes", "no"]}}}
    bodies = [
        {"model": "tiny-llama", "messages": [{"role": "user", "content": "x" * count}], "max_tokens": 9, **more}
        for count, more in ((1, {}), (30, {}), (2, {"n": 2, "seed": 3}), (3, {"response_format": form}))
    ]
    lines = [line(str(place), CHAT, **body) for place, body in enumerate(bodies)]
    batch = done(client, lines)
    assert batch.request_counts.completed == 4, answers(client, batch.error_file_id)
    found = answers(client, batch.output_file_id)
    for place, body in enumerate(bodies):
        direct = client.chat.completions.create(**body).model_dump(exclude_unset=True)
        assert found[str(place)]["response"]["body"]["choices"] == direct["choices"]


def test_a_wrong_place_or_option_is_refused_before_anything_is_loaded(server: Process, checkpoint: Path) -> None:
    taken = server.url.rsplit(":", 1)[1]
    for arguments, said in (
        (("--port", taken), "cannot (Address already in use)"),
        (("--port", "0", "--tool-call-parser", "x"), "there are auto, "),
        (("--port", "0", "--enable-lora", "poet"), "NAME=PATH"),
        (("--port", "0", "--chat-template", "/nowhere.jinja"), "cannot be read"),
        (("--port", "0", "--files-dir", "/dev/null/files"), "files were to be kept in /dev/null/files"),
    ):
        done = CliRunner().invoke(app, ["serve", str(checkpoint), *arguments])
        assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output


@pytest.mark.slow
def test_it_endures_a_crowd(server: Process) -> None:
    pytest.importorskip("schemathesis")
    script = Path(__file__).parents[3] / "benchmarks" / "serve_load.py"
    command = [sys.executable, str(script), "--seconds", "6", "--clients", "30", "--key", "secret"]
    command += ["--url", server.url, "--pid", str(server.process.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"fuzzed: {.*'4\d\d': \d+", done.stdout), done.stdout


def test_a_signal_lets_answers_end_and_the_process_end_well(server: Process) -> None:
    stream = iter(server.client().completions.create(model="tiny-llama", prompt="abc", max_tokens=90, stream=True))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log.read_text()
