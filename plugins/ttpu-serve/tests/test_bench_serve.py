"""What `ttpu bench` promises: latencies and rates as defined, failures counted and named, workloads that repeat."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_openai
import numpy as np
import pytest
import tiny
from fake_openai import PAUSE, PROMPT_TOKENS, FakeServer
from typer.testing import CliRunner, Result

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.bench.events import EventDecoder
from ttpu_serve.bench.offline import measure
from ttpu_serve.bench.summary import Distribution, parse_objectives, summarize
from ttpu_serve.bench.tokenizer import load_tokenizer
from ttpu_serve.bench.workload import Lengths, Prompt, arrivals, random_prompts, read_dataset
from ttpu_serve.cli.bench import app

httpx = pytest.importorskip("httpx")

from ttpu_serve.bench.client import Client, Timeline  # noqa: E402
from ttpu_serve.bench.load import send_all  # noqa: E402

TOKENS = 4


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with fake_openai.running() as server:
        yield server


def ask(fake: FakeServer, *behaviours: str, **options: Any) -> list[Timeline]:
    """The timelines of one request of each behaviour, all at once."""
    concurrency = options.pop("max_concurrency", None)

    async def run() -> list[Timeline]:
        async with Client(fake.url, model="fake-model", **options) as client:
            prompts = [Prompt(behaviour, TOKENS) for behaviour in behaviours]
            return await send_all(client, prompts, [0.0] * len(prompts), max_concurrency=concurrency)

    return asyncio.run(run())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


# -- what one request's timeline says --


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_piece_of_an_answer_is_noted_when_it_comes(fake: FakeServer, endpoint: Any) -> None:
    (line,) = ask(fake, "slow", endpoint=endpoint)
    assert (line.error, line.output_tokens, line.prompt_tokens) == (None, TOKENS, PROMPT_TOKENS)
    assert len(line.chunks) == TOKENS  # neither the role that opens a chat nor the empty last piece is a token
    assert line.ttft is not None and line.tpot is not None
    assert line.ttft >= PAUSE * 0.9 and line.tpot >= PAUSE * 0.9 and line.latency >= TOKENS * PAUSE * 0.9
    assert line.tpot == pytest.approx(sum(line.gaps) / (TOKENS - 1))


def test_events_are_put_together_from_pieces_of_any_size(fake: FakeServer) -> None:
    (line,) = ask(fake, "split")
    assert (line.error, line.output_tokens, len(line.chunks)) == (None, TOKENS, TOKENS)
    text = 'data: {"a": "\u2028"}\r\n\r\ndata: 1\ndata: 2\n\n: nothing\n\n'.encode()
    for size in (1, 2, 3, 7, len(text)):
        decoder = EventDecoder()
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        events = [event.decode() for piece in pieces for event in decoder.feed(piece)]
        assert events == ['{"a": "\u2028"}', "1\n2"]


def test_tokens_are_the_servers_count_and_pieces_where_it_has_none(fake: FakeServer) -> None:
    pairs, uncounted = ask(fake, "pairs", "uncounted")
    assert (pairs.output_tokens, len(pairs.chunks), pairs.counted) == (2 * TOKENS, TOKENS, True)
    assert (uncounted.output_tokens, uncounted.counted) == (TOKENS, False)
    assert not summarize([pairs, uncounted]).tokens_counted


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("refuse", "HTTP 429: too many requests wait"),
        ("page", "HTTP 502: <html> bad gateway</html>"),
        ("wrong", "error in the stream: the engine failed"),
        ("short", "the stream ended before the response did"),
        ("cut", "RemoteProtocolError: peer closed connection"),
        ("silent", "nothing came for 0.3 s (ReadTimeout)"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_that_says_why(fake: FakeServer, behaviour: str, error: str) -> None:
    failed, fine = ask(fake, behaviour, "fine", timeout=0.3)
    assert failed.error is not None and failed.error.startswith(error)
    assert fine.error is None  # one failure is no other request's


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    result = run("serve", "--url", "http://127.0.0.1:9", "--num-prompts", "1")
    assert isinstance(result.exception, RequestError)
    assert "start the server" in str(result.exception) and "ConnectError" in str(result.exception)


# -- what is sent, and when --


def test_no_more_than_max_concurrency_are_under_way(fake: FakeServer) -> None:
    fake.peak = 0
    lines = ask(fake, *["slow"] * 6, max_concurrency=2)
    assert fake.peak == 2 and summarize(lines).peak_concurrency == 2
    first, second, third, *_ = sorted(lines, key=lambda line: line.sent)
    assert third.sent >= min(first.end, second.end)


def test_requests_ask_for_a_stream_with_usage_and_for_what_was_said(fake: FakeServer) -> None:
    ask(fake, "fine", extra={"top_k": 5}, api_key="secret")
    assert fake.headers["authorization"] == "bearer secret"
    expected = {"model": "fake-model", "prompt": "fine", "max_tokens": TOKENS, "top_k": 5, "stream": True}
    assert fake.bodies[-1] == {**expected, "stream_options": {"include_usage": True}}
    ask(fake, "fine", endpoint="chat")
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "fine"}]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h/api/v3", "https://h/api/v3"),
    ],
)
def test_the_version_in_an_address_may_be_left_out(given: str, meant: str) -> None:
    assert Client(given).url == meant


def test_gaps_between_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    for burstiness in (0.25, 1.0, 4.0):
        moments = arrivals(20_000, 8.0, burstiness=burstiness, seed=3)
        gaps = np.diff(moments)
        assert moments[0] == 0.0 and moments == arrivals(20_000, 8.0, burstiness=burstiness, seed=3)
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)  # of a gamma distribution


def test_random_prompts_have_lengths_in_range_and_repeat_with_their_seed() -> None:
    prompts = random_prompts(50, Lengths(3, 9), Lengths(2, 2), seed=1, prefix=4, vocab_size=100)
    assert prompts == random_prompts(50, Lengths(3, 9), Lengths(2, 2), seed=1, prefix=4, vocab_size=100)
    assert {len(prompt.content) for prompt in prompts} == set(range(4 + 3, 4 + 9 + 1))
    assert len({prompt.content[:4] for prompt in prompts}) == 1 and len({prompt.content for prompt in prompts}) == 50
    words = random_prompts(3, Lengths(5, 5), Lengths(1, 1))
    assert all(len(str(prompt.content).split()) == 5 and prompt.tokens is None for prompt in words)


def test_random_texts_have_as_many_of_a_tokenizers_tokens_as_asked_for(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for prompt in random_prompts(5, Lengths(20, 40), Lengths(1, 1), tokenizer=tokenizer):
        assert prompt.tokens == len(tokenizer.encode(str(prompt.content)))
        assert prompt.tokens is not None and 20 <= prompt.tokens <= 40


def test_datasets_of_every_form_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\u2028and more\n")
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    rows: list[dict[str, Any]] = [{"prompt": "one", "max_tokens": 5}, {"prompt": [1, 2]}, chat]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
    (tmp_path / "c.json").write_text(json.dumps([{"id": "x", "conversations": turns}]))

    def read(name: str, number: int | None = None) -> list[Prompt]:
        return read_dataset(tmp_path / name, number, Lengths(8, 8))

    assert [prompt.content for prompt in read("a.txt")] == ["one", "two\u2028and more"]
    assert [(prompt.max_tokens, prompt.is_ids, prompt.is_chat) for prompt in read("b.jsonl")] == [
        (5, False, False),
        (8, True, False),
        (8, False, True),
    ]
    assert [prompt.content for prompt in read("c.json")] == ["a question"]
    assert sorted(str(prompt.content) for prompt in read("a.txt", 4)) == ["one", "one", *["two\u2028and more"] * 2]


@pytest.mark.parametrize("line", ["[1]", '{"text": "no prompt"}', '{"prompt": "", "max_tokens": 4}', "{"])
def test_a_row_that_is_no_prompt_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(RequestError, match=r"rows\.jsonl.*(line 1|valid JSONL)|line 1.*rows\.jsonl"):
        read_dataset(tmp_path / "rows.jsonl", None, Lengths(1, 1))


# -- what all timelines say together --


def answered(sent: float, first: float, gap: float, tokens: int, *, due: float | None = None) -> Timeline:
    chunks = [sent + first + gap * place for place in range(tokens)]
    return Timeline(sent if due is None else due, sent, chunks[-1], chunks, 10, tokens, True)


def test_rates_and_percentiles_are_those_of_whole_answers() -> None:
    # Time to first token 10, 20, … 100 ms, then 5 tokens 20 ms apart; sent a second apart.
    lines = [answered(float(i), 0.01 * (i + 1), 0.02, 5) for i in range(10)]
    lines.append(Timeline(due=4.0, sent=4.5, end=300.0, error="nothing came for 295.5 s (ReadTimeout)"))
    summary = summarize(lines, objectives={"ttft": 45.0}, percentiles=(50, 90, 99))
    assert (summary.requests, summary.completed, summary.failed) == (11, 10, 1)
    assert summary.errors == {"nothing came for 295.5 s (ReadTimeout)": 1}
    assert summary.seconds == pytest.approx(9.18)  # until the last answer's end; the failed request has none
    assert summary.request_rate == pytest.approx(10 / 9.18)
    assert summary.output_token_rate == pytest.approx(50 / 9.18)
    assert summary.total_token_rate == pytest.approx((50 + 100) / 9.18)
    assert summary.goodput == pytest.approx(4 / 9.18)  # 10, 20, 30 and 40 ms
    busy = sum(0.01 * (i + 1) + 0.08 for i in range(10)) + 9.18 - 4.5
    assert summary.mean_concurrency == pytest.approx(busy / 9.18)
    assert summary.ttft is not None and summary.itl is not None and summary.e2e is not None and summary.held is not None
    assert summary.ttft.percentiles == pytest.approx({50.0: 55.0, 90.0: 91.0, 99.0: 99.1})
    assert (summary.ttft.mean, summary.ttft.maximum) == pytest.approx((55.0, 100.0))
    assert (summary.itl.count, summary.itl.mean) == (40, pytest.approx(20.0))
    assert summary.tpot is not None and summary.tpot.mean == pytest.approx(20.0)
    assert summary.e2e.maximum == pytest.approx(180.0)
    assert summary.held.maximum == pytest.approx(500.0)


def test_concurrency_is_counted_from_sending_to_the_end() -> None:
    lines = [answered(0.0, 2.0, 1.0, 1), answered(1.0, 2.0, 1.0, 1), answered(3.0, 1.0, 1.0, 1)]
    summary = summarize(lines)
    assert summary.peak_concurrency == 2  # the third is sent as the second ends
    assert summary.mean_concurrency == pytest.approx((2 + 2 + 1) / 4)


def test_an_answer_of_one_token_has_no_time_per_token_and_breaks_no_objective_of_it() -> None:
    summary = summarize([answered(0.0, 0.01, 0.0, 1)], objectives={"tpot": 1.0, "ttft": 20.0})
    assert summary.tpot is None and summary.itl is None
    assert summary.goodput == pytest.approx(summary.request_rate)


def test_nothing_answered_is_all_zero() -> None:
    summary = summarize([Timeline(0.0, 0.0, 1.0, error="no")])
    assert (summary.request_rate, summary.output_token_rate, summary.ttft, summary.goodput) == (0.0, 0.0, None, None)
    assert Distribution.of([None]) is None


def test_objectives_are_read_and_others_refused() -> None:
    assert parse_objectives("ttft:200, tpot:50.5") == {"ttft": 200.0, "tpot": 50.5}
    assert parse_objectives(None) == {}
    for text in ("ttft", "ttft:x", "speed:3", "tpot:-1", "ttft:nan"):
        with pytest.raises(RequestError, match="--slo"):
            parse_objectives(text)


def test_repetitions_off_the_clock_are_not_measured() -> None:
    calls: list[int] = []

    def answer() -> tuple[int, int]:
        calls.append(1)
        return 30, 20

    summary = measure(answer, 4, warmups=2, rounds=3)
    assert (len(calls), len(summary.seconds)) == (5, 3)
    median = float(np.median(summary.seconds))
    assert summary.output_token_rate == pytest.approx(20 / median)
    assert summary.total_token_rate == pytest.approx(50 / median)
    assert summary.request_rate == pytest.approx(4 / median)


# -- the commands --


def test_serve_shows_writes_and_draws_what_it_measured(fake: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "prompts.txt").write_text("fine\nfine too\nrefuse\nslow\n")
    files = ("--output", str(tmp_path / "result.json"), "--plot", str(tmp_path / "latency.svg"))
    load = ("--dataset", str(tmp_path / "prompts.txt"), "--output-tokens", "4", "--request-rate", "200")
    shown = run("serve", "--url", fake.url, *load, "--slo", "ttft:5000", *files)
    assert shown.exit_code == 0, shown.output
    for text in ("3 succeeded, 1 failed", "goodput", "time to first token", "1 × HTTP 429: too many requests wait"):
        assert text in shown.stdout
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["settings"]["model"] == "fake-model" and document["settings"]["request_rate"] == 200.0
    asked = {"prompts": 4, "input_tokens": None, "output_tokens": "4", "warmup": 1, "slo": "ttft:5000"}
    assert {name: document["settings"][name] for name in asked} == asked
    assert "ttpu-jax" in document["machine"]["versions"]
    results, requests = document["results"], document["requests"]
    assert (results["completed"], results["failed"], results["output_tokens"]) == (3, 1, 12)
    assert [request["error"] is None for request in requests] == [True, True, False, True]
    assert set(results["ttft"]["percentiles"]) == {"p50", "p90", "p99"}
    picture = (tmp_path / "latency.svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "first token" in picture and "failed" in picture


def test_serve_prints_one_json_object_and_fails_if_nothing_was_answered(fake: FakeServer) -> None:
    load = ("serve", "--url", fake.url, "--num-prompts", "3", "--vocab-size", "50", "--input-tokens", "2-4")
    fine = run(*load, "--output-tokens", "2", "--percentiles", "25,99.9", "--json")
    results = json.loads(fine.stdout)["results"]
    assert results["completed"] == 3 and set(results["e2e"]["percentiles"]) == {"p25", "p99.9"}
    assert all(0 <= token < 50 for body in fake.bodies[-3:] for token in body["prompt"])
    assert fake.bodies[-1]["temperature"] == 0.0 and "ignore_eos" not in fake.bodies[-1]


def test_a_server_is_not_warmed_up_with_what_is_measured(fake: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    load = ("serve", "--url", fake.url, "--num-prompts", "2", "--warmup", "2", "--json")
    for workload in (("--vocab-size", "5000"), ("--dataset", str(tmp_path / "prompts.txt"))):
        before = len(fake.bodies)
        assert run(*load, *workload).exit_code == 0
        asked = [json.dumps(body["prompt"]) for body in fake.bodies[before:]]
        assert len(asked) == 4 and not set(asked[:2]) & set(asked[2:])


def test_status_one_says_that_no_request_was_answered(fake: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("page\nwrong\n")
    load = ("serve", "--url", fake.url, "--dataset", str(tmp_path / "prompts.txt"))
    measured = run(*load, "--warmup", "0", "--json")
    assert measured.exit_code == 1 and json.loads(measured.stdout)["results"]["failed"] == 2
    warmed = run(*load)
    assert isinstance(warmed.exception, RequestError) and "HTTP 502" in str(warmed.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--input-tokens", "9-3"), "--input-tokens"),
        (("--output-tokens", "none"), "--output-tokens"),
        (("--request-rate", "0"), "--request-rate"),
        (("--request-rate", "nan"), "--request-rate"),
        (("--burstiness", "inf"), "--burstiness"),
        (("--percentiles", "50,101"), "--percentiles"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--extra-body", '{"n": 2}'), "n=2"),
        (("--output", "/nowhere/at/all.json"), "--output"),
        (("--plot", "latency.pdf"), ".png or .svg"),
        (("--url", "ftp://host"), "--url"),
        (("--endpoint", "chat", "--vocab-size", "9", "--num-prompts", "1"), "--endpoint completions"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(fake: FakeServer, arguments: tuple[str, ...], named: str) -> None:
    url = () if "--url" in arguments else ("--url", fake.url)
    result = run("serve", *url, "--warmup", "0", *arguments)
    error: BaseException | None = result.exception
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RequestError) and named in str(error)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ttpu_core.pictures.find_spec", lambda name: None)
    result = run("serve", "--plot", str(tmp_path / "a.png"))
    assert isinstance(result.exception, MissingDependencyError) and "ttpu-core[plot]" in str(result.exception)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("bench") / "llama")


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_offline_commands_answer_every_token_asked_for(command: str, checkpoint: Path, tmp_path: Path) -> None:
    size = ("--num-prompts", "3") if command == "throughput" else ("--batch-size", "3")
    engine = ("--max-num-seqs", "4", "--max-model-len", "64", "--max-num-batched-tokens", "32")
    tokens = ("--input-tokens", "5", "--output-tokens", "4")
    result = run(command, str(checkpoint), *size, *engine, *tokens, "--warmups", "1", "--rounds", "2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    results = document["results"]
    assert (results["requests"], results["prompt_tokens"], results["output_tokens"]) == (3, 15, 12)
    assert len(results["seconds"]) == 2 and document["machine"]["devices"]["platform"] == "cpu"


def test_conversations_of_a_dataset_are_rendered_with_the_checkpoints_template(tmp_path: Path) -> None:
    folder, dataset = tiny.llama_checkpoint(tmp_path / "llama"), tmp_path / "chats.jsonl"
    tiny.write_tokenizer(folder)
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "hello"}]}, {"prompt": [1, 2]}]
    dataset.write_text("\n".join(map(json.dumps, rows)))
    small = ("--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "32", "--output-tokens", "2")
    asked = ("throughput", str(folder), "--dataset", str(dataset), "--num-prompts", "2", *small)
    refused = run(*asked).exception
    assert isinstance(refused, RequestError) and "chat template" in str(refused)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}!")
    result = run(*asked, "--warmups", "0", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.exception
    read = len(load_tokenizer(str(folder)).encode("hello!", add_special_tokens=False)) + 2
    assert json.loads(result.stdout)["results"]["prompt_tokens"] == read
