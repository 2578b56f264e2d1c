"""What a server endures. In: a server of its own over a tiny random llama, or one that runs already; out: whether it
came through a crowd of streaming clients, some of whom leave early, ask too much, send nonsense or read slowly, while
schemathesis sends what it makes of the server's own OpenAPI document.

    python benchmarks/serve_load.py                              200 clients for 2 minutes
    python benchmarks/serve_load.py --seconds 10 --clients 50 --url http://127.0.0.1:8000 --pid 4711 --key secret

It fails (status 1) where the server died or logged a traceback, an answer was wrong or cut, an error was not a 4xx in
OpenAI's form (or Anthropic's, at its paths), pages or requests were left behind, memory grew, or the slowest percent of
answers took too long. Memory is read from /proc, so on Linux alone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CONTEXT = 512
KINDS = {"whole": 62, "leaves": 20, "too long": 6, "malformed": 6, "too large": 3, "several": 3}
GROWTH = 1.10  # of resident memory from the first third of the run to the last
GROWTH_FREE = 48 * 2**20  # and so much may be added besides: allocators keep what they had at the peak
SPOILED: tuple[bytes, ...] = (b"{", b"[]", b'{"model": 1}', b'{"prompt": "x", "n": -1}', b"\xff\xfe", b"null", b"")


@dataclass
class Findings:
    """What was seen."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token
    whole: list[float] = field(default_factory=list)  # seconds to the last
    memory: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0

    def fail(self, text: str) -> None:
        """Something is wrong; the first hundred are kept."""
        self.counts["wrong"] += 1
        if len(self.wrong) < 100:
            self.wrong.append(text)


def check_error(status: int, content: bytes, expected: tuple[int, ...]) -> str | None:
    """What is wrong with an error, if anything is."""
    if status not in expected:
        return f"status {status} where {expected} was expected: {content[:200]!r}"
    try:
        told = json.loads(content)
        error, of_anthropic = told["error"], told.get("type") == "error"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"status {status} is not in OpenAI's form: {content[:200]!r}"
    missing = ({"message", "type"} if of_anthropic else {"message", "type", "param", "code"}) - set(error)
    return f"an error lacks {missing}: {content[:200]!r}" if missing else None


class Crowd:
    """The clients."""

    def __init__(self, asked: argparse.Namespace, url: str, model: str, context: int, found: Findings) -> None:
        self.asked, self.url, self.model, self.context, self.found = asked, url, model, context, found
        self.headers = {"authorization": f"Bearer {asked.key}"}

    async def run(self) -> None:
        """All of them, until the time is over."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        end = time.monotonic() + self.asked.seconds
        async with httpx.AsyncClient(base_url=self.url, headers=self.headers, limits=limits, timeout=300) as http:
            clients = [self._client(http, random.Random(number), end) for number in range(self.asked.clients)]
            await asyncio.gather(*clients, self._slow_reader(end), self._watch(http, end))

    async def _client(self, http: httpx.AsyncClient, draw: random.Random, end: float) -> None:
        await asyncio.sleep(draw.random() * 2)
        while time.monotonic() < end:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            self.found.counts[kind] += 1
            try:
                await self._ask(http, draw, kind)
            except httpx.HTTPError as error:
                self.found.fail(f"{kind}: {type(error).__name__} {error}")
            await asyncio.sleep(draw.expovariate(4))

    async def _ask(self, http: httpx.AsyncClient, draw: random.Random, kind: str) -> None:
        path, prompt = "/v1/completions", "".join(draw.choices("abcdefgh ", k=draw.randrange(4, self.context // 4)))
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": draw.randrange(4, min(64, self.context // 2)),
        }
        body |= {"ignore_eos": True, "temperature": draw.choice([0, 1]), "seed": draw.randrange(99)}
        if kind == "malformed":
            response = await http.post(path, content=draw.choice(SPOILED), headers={"content-type": "application/json"})
            self._refused(kind, response, (400,))
        elif kind == "too long":
            self._refused(kind, await http.post(path, json={**body, "prompt": "x" * 5000}), (400,))
        elif kind == "too large":
            self._refused(kind, await http.post(path, json={**body, "prompt": "x" * (9 << 20)}), (413,))
        elif kind == "several":
            response = await http.post(path, json={**body, "n": 3, "prompt": [prompt, prompt[:3]]})
            if response.status_code != 429 and len(response.json().get("choices", ())) != 6:
                self.found.fail(f"{kind}: {response.text[:200]}")
        else:
            await self._stream(http, path, body, draw.randrange(1, 9) if kind == "leaves" else None)

    async def _stream(self, http: httpx.AsyncClient, path: str, body: dict[str, Any], leave_after: int | None) -> None:
        began, first, pieces, usage, reason = time.monotonic(), None, 0, None, None
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", path, json=asked) as response:
            if response.status_code != 200:
                self._refused("stream", response, (429,), await response.aread())
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                told = json.loads(line[6:])
                if "error" in told:
                    self.found.fail(f"a stream ended with {told}")
                    return
                first = first or time.monotonic()
                pieces += 1
                usage = told.get("usage") or usage
                reason = (told["choices"] and told["choices"][0]["finish_reason"]) or reason
                if leave_after is not None and pieces >= leave_after:
                    return
        if leave_after is not None:
            return
        if usage is None or usage["completion_tokens"] != body["max_tokens"] or reason != "length":
            self.found.fail(f"{body['max_tokens']} tokens were asked for, but {usage} came, ended by {reason}")
            return
        self.found.tokens += usage["completion_tokens"]
        self.found.first.append((first or began) - began)
        self.found.whole.append(time.monotonic() - began)

    def _refused(
        self, kind: str, response: httpx.Response, expected: tuple[int, ...], content: bytes | None = None
    ) -> None:
        self.found.counts[f"status {response.status_code}"] += 1
        if problem := check_error(response.status_code, response.content if content is None else content, expected):
            self.found.fail(f"{kind}: {problem}")

    async def _slow_reader(self, end: float) -> None:
        """Reads a hundred bytes a second of answers that have hundreds of thousands."""
        host, port = self.url.split("//")[1].split(":")
        body = {
            "model": self.model,
            "prompt": "slow",
            "max_tokens": self.context - 20,
            "logprobs": 5,
            "stream": True,
            "n": 2,
        }
        content = json.dumps(body | {"ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: {self.headers['authorization']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect((host, int(port)))
            reader.sendall(head.encode() + content)
            reader.setblocking(False)
            while time.monotonic() < end:
                await asyncio.sleep(1)
                with contextlib.suppress(BlockingIOError):
                    if not reader.recv(100):
                        return

    async def _watch(self, http: httpx.AsyncClient, end: float) -> None:
        """Memory, once a second."""
        while time.monotonic() < end:
            self.found.memory.append((time.monotonic(), resident(self.asked.pid)))
            await asyncio.sleep(1)


def resident(pid: int | None) -> int:
    """Bytes of a process's memory; 0 where that is not known."""
    try:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) * 1024
    except (OSError, IndexError):
        return 0


def fuzz(url: str, key: str, seconds: float, model: str) -> None:
    """What schemathesis makes of the server's OpenAPI document, valid and not, one path after another; prints counts
    and whatever is wrong as JSON. In a process of its own, for it takes a core."""
    import hypothesis
    import schemathesis
    from schemathesis import GenerationMode

    quiet = hypothesis.settings(
        max_examples=12, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json").exclude(tag="Administration")
    operations = [result.ok() for result in schema.get_all_operations()]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    end = time.monotonic() + seconds

    def send(case: Any) -> None:
        if time.monotonic() > end:
            return
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and random.random() < 0.8:
            case.body["model"] = model  # else nothing goes beyond its name
        response = case.call(base_url=url, headers=headers, timeout=120)
        counts[str(response.status_code)] += 1
        if response.status_code >= 400 and response.content != b"Invalid HTTP request received.":  # uvicorn's own
            problem = check_error(response.status_code, response.content, tuple(range(400, 500)))
            if problem:
                wrong.append(f"{case.method} {case.path} {str(case.body)[:300]}: {problem}")

    while time.monotonic() < end:
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with contextlib.suppress(hypothesis.errors.Unsatisfiable, hypothesis.errors.HypothesisException):
                    hypothesis.seed(random.randrange(2**32))(
                        quiet(hypothesis.given(case=operation.as_strategy(mode))(send))
                    )()
    print(json.dumps({"counts": counts, "wrong": wrong[:20]}))


@contextlib.contextmanager
def own_server(log: Path) -> Any:
    """`ttpu serve` over a tiny llama: its URL and process."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import tiny

    with tempfile.TemporaryDirectory() as folder, log.open("w") as errors:
        checkpoint = tiny.llama_checkpoint(Path(folder) / "tiny", chat=True, max_position_embeddings=CONTEXT)
        command = [sys.executable, "-m", "ttpu_core.cli.main", "serve", str(checkpoint), "--port", "0"]
        command += ["--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--api-key", "load"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ)
        try:
            line = process.stdout.readline() if process.stdout else ""
            url = re.search(r"http://[\d.]+:\d+", line)
            if url is None:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            yield url[0], process
        finally:
            process.terminate()
            process.wait(60)


def verdict(asked: argparse.Namespace, found: Findings, fuzzed: Any, after: Any, log: Path | None) -> list[str]:
    """All that is wrong."""
    wrong = [*found.wrong, *(f"fuzzed: {one}" for one in fuzzed["wrong"])]
    if after["running"] or after["waiting"] or any(after["pages_in_use"].values()):
        wrong.append(f"requests or pages were left behind: {after}")
    third = max(len(found.memory) // 3, 1)
    early = sorted(size for _, size in found.memory[:third])[third // 2]
    late = sorted(size for _, size in found.memory[-third:])[third // 2]
    if late > early * GROWTH + GROWTH_FREE:
        wrong.append(f"resident memory grew from {early >> 20} to {late >> 20} MiB")
    slowest = percentile(found.whole, 0.99)
    if not found.whole or slowest > asked.p99:
        wrong.append(
            f"the slowest percent of {len(found.whole)} answers took {slowest:.1f} s or more, not {asked.p99} s"
        )
    if log is not None and "Traceback" in (text := log.read_text()):
        wrong.append(f"the server's log has a traceback: {text[-3000:]}")
    for name, share in (("first token", found.first), ("answer", found.whole)):
        print(f"{name}: p50 {percentile(share, 0.5):.2f} s, p99 {percentile(share, 0.99):.2f} s")
    speed = found.tokens / asked.seconds
    print(f"{len(found.whole)} whole answers, {speed:.0f} tokens/s; memory {early >> 20} → {late >> 20} MiB")
    print(f"clients: {dict(found.counts)}; fuzzed: {fuzzed['counts']}")
    return wrong


def percentile(values: list[float], share: float) -> float:
    """The value below which that share lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def attack(asked: argparse.Namespace, url: str, log: Path | None) -> int:
    """Run it all against a server; the exit status."""
    found, served = Findings(), httpx.get(f"{url}/stats", timeout=60).json()
    command = [sys.executable, __file__, "--fuzz", "--url", url, "--key", asked.key, "--seconds", str(asked.seconds)]
    fuzzer = None if asked.no_fuzz else subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    asyncio.run(Crowd(asked, url, served["model"], served["max_model_len"], found).run())
    fuzzed = json.loads(fuzzer.communicate(timeout=300)[0].splitlines()[-1]) if fuzzer else {"counts": {}, "wrong": []}
    for _ in range(150):  # what was left behind is aborted within a step
        after = httpx.get(f"{url}/stats", timeout=60).json()["engine"]
        if not (after["running"] or after["waiting"]):
            break
        time.sleep(0.2)
    wrong = verdict(asked, found, fuzzed, after, log)
    for text in wrong:
        print(f"WRONG {text}", file=sys.stderr)
    print("endured" if not wrong else f"{len(wrong)} findings")
    return 1 if wrong else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--p99", type=float, default=60, help="the most seconds of the slowest percent of answers")
    parser.add_argument("--url", help="a server that runs; without it, one of its own")
    parser.add_argument("--pid", type=int, help="that server's process, whose memory is watched")
    parser.add_argument("--key", default="load")
    parser.add_argument("--no-fuzz", action="store_true", help="without schemathesis")
    parser.add_argument("--fuzz", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.fuzz:
        fuzz(asked.url, asked.key, asked.seconds, httpx.get(f"{asked.url}/stats", timeout=60).json()["model"])
        return 0
    if asked.url:
        return attack(asked, asked.url, None)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with own_server(log) as (url, process):
            asked.pid = process.pid
            status = attack(asked, url, log)
            if process.poll() is not None:
                print(
                    f"WRONG the server ended with status {process.poll()}: {log.read_text()[-3000:]}", file=sys.stderr
                )
                return 1
        return status


if __name__ == "__main__":
    sys.exit(main())
