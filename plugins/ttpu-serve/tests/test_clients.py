"""Clients of other projects, each in a process of its own, against one `ttpu serve` of this repository's checkpoint.
docs/from-vllm.md lists what they asked for; `TTPU_WRITE_CLIENTS=1` writes that list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import xla_flags
from torchless import torchless

pytestmark = pytest.mark.slow  # the lane of the newest jax does without

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "clients"
CHECKPOINT = ROOT / "examples/checkpoints/pydoc-llama"
DOCUMENT = ROOT / "docs/from-vllm.md"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->"
PYTHON = Path(os.environ.get("TTPU_CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|user|>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPTIONS = ("--port", "0", "--max-num-seqs", "4", "--dtype", "float32", "--chat-template", TEMPLATE)
CLIENTS = {
    "anthropic": "anthropic",
    "guidellm": "guidellm",
    "instructor": "instructor",
    "langchain-openai": "langchain",
    "litellm": "litellm",
    "lm-eval": "lm_eval",
    "vllm bench serve": "vllm_bench",
}
"""Names → scripts."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that runs."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [sys.executable, "-m", "ttpu_core.cli.main", "serve", str(CHECKPOINT), *OPTIONS]
    environment = torchless({**os.environ, "XLA_FLAGS": xla_flags(1)})
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"serving pydoc-llama at (http://127\.0\.0\.1:\d+) ", process.stdout.readline())
        assert found, log.read_text()
        yield found[1]
        assert "Traceback" not in log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Rows of the document's table, which are written if all clients ran and it was asked for."""
    found: list[str] = []
    yield found
    if os.environ.get("TTPU_WRITE_CLIENTS") and len(found) == len(CLIENTS):
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        table = "\n".join(["| client | version | asks for, and gets |", "| --- | --- | --- |", *sorted(found)])
        DOCUMENT.write_text(f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")


def version_of(client: str) -> str | None:
    """The installed version of a client; None if it is not installed."""
    if client == "vllm bench serve":
        return "its requests"
    code = f"from importlib.metadata import version; print(version({client!r}))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_what_it_asks_for(client: str, url: str, rows: list[str], tmp_path: Path) -> None:
    version = version_of(client) if PYTHON.is_file() else None
    if version is None:
        pytest.skip(f"{client} is not installed in {PYTHON.parents[1].name}: `make environment` does it")
    # Its own packages alone, and no way to the internet but by mistake.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | {"PYTHONPATH": str(SCRIPTS)}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"}
    command = [str(PYTHON), str(SCRIPTS / f"{CLIENTS[client]}_client.py"), url, "pydoc-llama", str(CHECKPOINT)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    row = f"| {client} | {version} | {'; '.join(json.loads(done.stdout.splitlines()[-1]))} |"
    rows.append(row)
    if not os.environ.get("TTPU_WRITE_CLIENTS"):
        assert row in DOCUMENT.read_text(), f"write it with TTPU_WRITE_CLIENTS=1: {row}"
