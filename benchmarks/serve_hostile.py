"""What ordinary clients of a server notice of hostile ones. In: `ttpu serve` of a checkpoint, started here; out: for
each attack, the 50th and 99th percentile of ordinary answers' seconds beside their undisturbed values, what the
attacker got, and the server's memory and pages afterwards. "company" is no attack: as many clients who are not hostile.

    python benchmarks/serve_hostile.py                          each attack for 20 seconds
    python benchmarks/serve_hostile.py --mixture 1800           random mixtures of all attacks for half an hour
    python benchmarks/serve_hostile.py --only tokenize --seconds 10 --json results.json

Attackers run in a process of their own, at the lowest priority (nice 19), as they are on other machines outside a
benchmark; they still take processor time from the server where cores are few. It fails (status 1) where the server
died, an ordinary answer was wrong, a refusal was not a 4xx in OpenAI's form, pages or requests were left behind, or
memory did not come back. Memory is read from /proc, so on Linux alone."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from serve_load import check_error, percentile, resident

from ttpu_serve.guided.isolated import TRIALS
from ttpu_serve.guided.process import GRAMMAR_BYTES, MASKS, TRIAL

CHECKPOINT = Path(__file__).parents[1] / "examples" / "checkpoints" / "pydoc-llama"
CLIENTS, TOKENS = 4, 16
MEMORY = 1.10
"""Times its value before the attacks that the memory of the server's own process may have after them."""
GUIDES_MIB = (2 * (MASKS.memory + GRAMMAR_BYTES) + TRIALS * TRIAL.memory) >> 20
"""Of the processes that compile and follow guides, which keep grammars up to a limit, and one beyond it."""
Sent = tuple[str, dict[str, str], bytes]
"""A request: its path, headers, and body."""


# -- what attackers send --


def asking(path: str = "/v1/chat/completions", **fields: Any) -> Sent:
    """A request for a few tokens with some fields."""
    body: dict[str, Any] = {"model": "pydoc-llama", "max_tokens": 8}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hi"}]
    elif path.endswith("completions"):
        body["prompt"] = "Hi"
    return path, {"content-type": "application/json"}, json.dumps(body | fields).encode()


def chain(count: int, kind: str) -> dict[str, Any]:
    """A JSON schema whose definitions refer to one another."""

    def link(number: int) -> dict[str, Any]:
        to = {"$ref": f"#/$defs/d{number + 1}"}
        return {"type": "object", "properties": {"a": to}} if kind == "properties" else {kind: [to]}

    definitions: dict[str, Any] = {f"d{number}": link(number) for number in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chains() -> Iterator[Sent]:
    """Grammars that overflow a compiler's stack."""
    for kind in itertools.cycle(("properties", "anyOf", "allOf")):
        count = random.randrange(1000, 1400)
        yield asking(guided_json=chain(count, kind))
        rules = "\n".join([f"r{number}: r{number + 1}" for number in range(4000)])
        yield asking(guided_grammar=f"start: r0\n{rules}\nr4000: /x/")
        terminals = "\n".join([f"T{number}: T{number + 1}" for number in range(4000)])
        yield asking(guided_grammar=f"start: T0\n{terminals}\nT4000: /x/")


def regexes() -> Iterator[Sent]:
    """Automata that take gigabytes."""
    for number in itertools.count():
        size = 10_000 + number % 10 * 1000
        yield asking(guided_regex="a?" * size + "a" * (size // 10))
        yield asking(guided_regex=f"(a|b)*a(a|b){{{900 + number % 100}}}")


def slow_guides() -> Iterator[Sent]:
    """Guides that take long to compile or to follow, each another one."""
    for number in itertools.count():
        words = [f"{number}{letter}{other}" * 20 for letter in "abcdefghij" for other in range(200)]
        yield asking(guided_choice=words)
        yield asking(guided_regex=rf"(.{{1,{200 + number % 50}}}x)+y{number}")
        yield asking(guided_json={"type": "object", "properties": {f"p{number}_{i}": {} for i in range(1500)}})


def tokenize() -> Iterator[Sent]:
    """Long texts to tokenize."""
    for size in itertools.cycle((7_600_000, 1_900_000, 400_000)):
        yield asking("/tokenize", prompt="a b" * (size // 3))
        yield asking("/v1/completions", prompt="ab" * (size // 4))


def references() -> Iterator[Sent]:
    """Tools whose schemas refer to themselves."""
    for parameters in itertools.cycle(({"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}})):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        yield asking(tools=tools, tool_choice="required")


def bodies() -> Iterator[Sent]:
    """Large, deep, and spoiled bodies."""
    head = {"content-type": "application/json"}
    many = b'{"model": "pydoc-llama", "prompt": [' + b"1," * 900_000 + b"1]}"
    objects = b'{"model": "pydoc-llama", "tools": [' + b"{}," * 600_000 + b"{}]}"
    spoiled = b'{"model": "pydoc-llama", "prompt": "' + b'\\"' * 900_000
    deep = b'{"a":' * 300_000
    for body in itertools.cycle((many, objects, spoiled, deep, b"[" * 1_800_000, b" " * 8_000_000)):
        yield "/v1/completions", head, body


def spoiled_fields() -> Iterator[Sent]:
    """Values that nobody expects."""
    cases = (
        asking(guided_grammar="start: ("),
        asking(guided_grammar="\x00"),
        asking(repetition_penalty=1e-38),
        asking("/detokenize", tokens=[10**9]),
        asking("/v1/completions", prompt=[10**9]),
        asking(logit_bias={"999999999": 1}),
        asking(n=10**6),
        asking(max_tokens=10**9),
        ("/v1/models", {"host": "evil.example"}, b""),
        ("/v1/chat/completions", {"connection": "upgrade", "upgrade": "websocket"}, b""),
        asking(temperature=1e308, seed=2**63),
    )
    yield from itertools.cycle(cases)


COMPANY = "company"


def company() -> Iterator[Sent]:
    """Nothing hostile: what as many clients more cost who ask for as much."""
    while True:
        yield asking()


SENDERS: dict[str, Callable[[], Iterator[Sent]]] = {
    COMPANY: company,
    "chains": chains,
    "regexes": regexes,
    "slow_guides": slow_guides,
    "tokenize": tokenize,
    "references": references,
    "bodies": bodies,
    "spoiled_fields": spoiled_fields,
}
ATTACKS = (*(name for name in SENDERS if name != COMPANY), "leaving", "half_sent", "slow_readers")


async def attack(name: str, url: str, seconds: float) -> dict[str, Any]:
    """Attack a server; return counts of what came back, and what was wrong with it."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    end = time.monotonic() + seconds

    async def send(http: httpx.AsyncClient, sent: Sent, timeout: float = 90) -> None:
        path, headers, body = sent
        try:
            method = "POST" if body else "GET"
            response = await http.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            counts[type(error).__name__] += 1
            return
        counts[str(response.status_code)] += 1
        if response.status_code >= 400:
            problem = check_error(response.status_code, response.content, tuple(range(400, 500)))
            if problem:
                wrong.append(f"{name}: {path} {body[:80]!r}: {problem}")

    async with httpx.AsyncClient(base_url=url) as http:
        if name in SENDERS:
            sources = SENDERS[name]()

            async def keep_sending() -> None:
                while time.monotonic() < end:
                    await send(http, next(sources))

            await asyncio.gather(*(keep_sending() for _ in range(3)))
        elif name == "leaving":
            sources = itertools.chain.from_iterable(zip(slow_guides(), tokenize(), regexes(), strict=False))
            while time.monotonic() < end:
                await asyncio.gather(*(send(http, next(sources), 0.3) for _ in range(3)))
        else:
            await on_sockets(name, url, end, counts)
    return {"counts": counts, "wrong": wrong[:20]}


async def on_sockets(name: str, url: str, end: float, counts: Counter[str]) -> None:
    """Send halves of requests, or do not read answers."""
    host, port = url.split("//")[1].split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    whole = asking("/v1/completions", prompt="Hi", max_tokens=400, logprobs=5, stream=True, ignore_eos=True)[2]
    halves = (head, head + b'content-length: 1000\r\n\r\n{"model": ', b"")
    sockets: list[socket.socket] = []
    for number in itertools.count():
        if time.monotonic() > end:
            break
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        try:
            client.connect((host, int(port)))
            request = head + b"content-length: %d\r\n\r\n%b" % (len(whole), whole)
            client.sendall(halves[number % 3] if name == "half_sent" else request)
            counts["connections"] += 1
        except OSError as error:
            counts[type(error).__name__] += 1
        sockets.append(client)
        await asyncio.sleep(0.01 if name == "half_sent" else 1)
    for client in sockets:
        client.close()


# -- ordinary clients --


class Ordinary:
    """Clients that ask for a few tokens, one request after another."""

    def __init__(self, url: str) -> None:
        self.url, self.seconds, self.wrong = url, list[float](), list[str]()
        self.expected: str | None = None

    async def until(self, ended: Callable[[], bool]) -> list[float]:
        """Ask until something is true; the seconds of each answer."""
        self.seconds = []
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            await asyncio.gather(*(self._ask(http, ended) for _ in range(CLIENTS)))
        return self.seconds

    async def _ask(self, http: httpx.AsyncClient, ended: Callable[[], bool]) -> None:
        body = {"model": "pydoc-llama", "prompt": "A function definition", "max_tokens": TOKENS, "temperature": 0}
        while not ended():
            began = time.monotonic()
            try:
                response = await http.post("/v1/completions", json=body | {"ignore_eos": True})
                text = response.json()["choices"][0]["text"]
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.wrong.append(f"an ordinary request failed: {type(error).__name__} {error}")
                await asyncio.sleep(0.2)
                continue
            self.seconds.append(time.monotonic() - began)
            self.expected = self.expected or text
            if text != self.expected:
                self.wrong.append(f"an ordinary answer was {text!r}, not {self.expected!r}")
            await asyncio.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """A process and those that it started."""
    found = [pid]
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in each.read_text().split():
            found += descendants(int(child))
    return found


def held(pid: int) -> int:
    """Bytes of memory of a process and those that it started."""
    return sum(resident(each) for each in descendants(pid))


def settled(url: str) -> Any:
    """The engine's counters when nothing runs any more, or after half a minute."""
    for _ in range(150):
        engine = httpx.get(f"{url}/stats", timeout=60).json()["engine"]
        if not (engine["running"] or engine["waiting"]):
            break
        time.sleep(0.2)
    return engine


# -- the run --


def run(asked: argparse.Namespace, url: str, pid: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure undisturbed clients, then each attack, or mixtures of all; rows of a table, and what was wrong."""
    ordinary, rows, wrong = Ordinary(url), [], list[str]()
    while httpx.get(f"{url}/stats", timeout=60).json()["engine"]["programs_pending"]:
        time.sleep(0.5)

    def measure(names: list[str], seconds: float) -> dict[str, Any]:
        command = [sys.executable, __file__, "--url", url, "--seconds", str(seconds)]
        attackers = [
            subprocess.Popen(["nice", "-n", "19", *command, "--attack", name], stdout=subprocess.PIPE, text=True)
            for name in names
        ]
        end = time.monotonic() + seconds
        taken = asyncio.run(
            ordinary.until(lambda: time.monotonic() > end and all(one.poll() is not None for one in attackers))
        )
        counts: Counter[str] = Counter()
        for one in attackers:
            told = json.loads(one.communicate()[0].splitlines()[-1])
            counts.update(told["counts"])
            wrong.extend(told["wrong"])
        engine = settled(url)
        row = {
            "attack": " + ".join(names) or "none",
            "answers": len(taken),
            "p50": round(percentile(taken, 0.5), 4),
            "p99": round(percentile(taken, 0.99), 4),
            "most": round(max(taken, default=0), 4),
            "counts": dict(counts),
            "mib_server": resident(pid) >> 20,
            "mib_guides": (held(pid) - resident(pid)) >> 20,
            "pages": sum(engine["pages_in_use"].values()),
        }
        before = rows[0] if rows else row
        row["ratio"] = round(row["p99"] / before["p99"], 2)
        rows.append(row)
        print(
            f"{row['attack']:40.40} {row['answers']:6} answers  p50 {row['p50']:.3f} s  p99 {row['p99']:.3f} s  "
            f"{row['ratio']:5.2f}×  most {row['most']:.2f} s  {row['mib_server']} MiB, guides {row['mib_guides']} MiB  "
            f"{row['pages']} pages  {row['counts']}",
            flush=True,
        )
        return row

    first = [asking(guided_regex="[0-9]{3}"), asking("/tokenize", prompt="a b" * 40_000)]
    for path, headers, body in first:  # starts the processes and threads that such requests have
        httpx.post(f"{url}{path}", content=body, headers=headers, timeout=120)
    measure([], asked.seconds)
    if asked.mixture:
        measure([COMPANY, COMPANY], asked.seconds)  # what as many honest clients as in a mixture cost
        end = time.monotonic() + asked.mixture
        while time.monotonic() < end:
            measure(random.sample(ATTACKS, 2), min(30, max(end - time.monotonic(), 5)))
    else:
        for name in asked.only or (COMPANY, *ATTACKS):
            measure([name], asked.seconds)
    last = measure([], asked.seconds)
    if last["pages"] != 0:
        wrong.append(f"{last['pages']} pages are in use with nothing to do")
    if last["mib_server"] > rows[0]["mib_server"] * MEMORY:
        wrong.append(f"memory was {rows[0]['mib_server']} MiB before, and {last['mib_server']} MiB after")
    if last["mib_guides"] > GUIDES_MIB:
        wrong.append(f"the processes of guides hold {last['mib_guides']} MiB, where {GUIDES_MIB} are allowed")
    return rows, wrong + ordinary.wrong[:20]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    parser.add_argument("--mixture", type=float, default=0, help="seconds of random pairs of attacks instead")
    parser.add_argument("--only", nargs="*", choices=(COMPANY, *ATTACKS))
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--attack", choices=(COMPANY, *ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.attack:
        print(json.dumps(asyncio.run(attack(asked.attack, asked.url, asked.seconds))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "ttpu_core.cli.main", "serve", str(asked.checkpoint), "--port", "0"]
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if "http://" not in line:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            url = "http://" + line.split("http://")[1].split()[0]
            rows, wrong = run(asked, url, process.pid)
            if process.poll() is not None:
                wrong.append(f"the server ended with status {process.poll()}: {log.read_text()[-3000:]}")
        finally:
            process.terminate()
            process.wait(60)
        if "Traceback" in (text := log.read_text()):
            wrong.append(f"the server's log has a traceback: {text[-3000:]}")
    if asked.json:
        versions = {name: version(name) for name in ("ttpu-serve", "jax", "llguidance", "uvicorn")}
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        told = {"machine": machine, "versions": versions, "clients": CLIENTS, "tokens": TOKENS, "rows": rows}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    for one in wrong:
        print(f"WRONG {one}", file=sys.stderr)
    print("endured" if not wrong else f"{len(wrong)} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
