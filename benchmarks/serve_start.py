"""How long a server takes to its first answer. In: `ttpu serve` of a checkpoint, started here in processes of their
own, in turn cold (no program is cached) and warm (the cold one's programs are); out: seconds to the first answered
request and until all programs are there, and how many programs there are.

    python benchmarks/serve_start.py
    python benchmarks/serve_start.py --rounds 5 --json results.json

A client asks for eight tokens every 20 ms until it gets them. The server says at /metrics how many programs it still
compiles. Modules' bytecode is written before the first round, as installers do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx

CHECKPOINT = Path(__file__).parents[1] / "examples" / "checkpoints" / "pydoc-llama"
BODY = {"model": "m", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8}
LIMIT = 300.0
COUNTED = re.compile(r"(\d+) programs? compiled in .*?, (\d+) more while it serves")
COMMAND = [sys.executable, "-m", "ttpu_core.cli.main", "serve", "--served-model-name", "m", "--port"]


def start(checkpoint: Path, cache: Path, port: int) -> dict[str, float]:
    """Start a server, ask until it answers, wait for its programs, and end it.

    Returns: `answered` and `compiled`, seconds since the start; `before` and `behind`, programs compiled before the
        server listens and while it serves.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen([*COMMAND, str(port), str(checkpoint)], stdout=log, stderr=log, env=env)

        def said() -> str:
            log.seek(0)
            return log.read()

        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                while not _answers(client):
                    if process.poll() is not None or time.perf_counter() - began > LIMIT:
                        raise SystemExit(f"the server does not answer: {said()}")
                    time.sleep(0.02)
                answered = time.perf_counter() - began
                while not re.search(r"^ttpu:programs_pending\S* 0(\.0)?$", client.get("/metrics").text, re.M):
                    if time.perf_counter() - began > LIMIT:
                        raise SystemExit(f"programs are still compiled after {LIMIT} seconds: {said()}")
                    time.sleep(0.2)
                compiled = time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)
        before, behind = map(int, COUNTED.search(said()).groups())  # type: ignore[union-attr]
    return {"answered": answered, "compiled": compiled, "before": before, "behind": behind}


def _answers(client: httpx.Client) -> bool:
    try:
        return client.post("/v1/chat/completions", json=BODY).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--rounds", type=int, default=3, help="each starts one server cold and one warm")
    parser.add_argument("--port", type=int, default=8753)
    parser.add_argument("--json", type=Path, help="write what was measured here")
    asked = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        start(asked.checkpoint, Path(folder) / "unmeasured", asked.port)
        for index in range(asked.rounds):
            for kind, measured in rows.items():
                measured.append(start(asked.checkpoint, Path(folder) / str(index), asked.port))
                print(kind, *(f"{name} {value:.1f}" for name, value in measured[-1].items()), flush=True)
    for kind, measured in rows.items():
        seconds = sorted(row["answered"] for row in measured)
        median = statistics.median(seconds)
        print(f"{kind}: first answer after {median:.1f} s (median; {seconds[0]:.1f} to {seconds[-1]:.1f})")
    if asked.json:
        versions = {name: version(name) for name in ("ttpu-core", "ttpu-jax", "ttpu-serve", "jax", "transformers")}
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        asked.json.write_text(json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
