"""Writes the tables of docs/from-vllm.md from the code: flags, fields of requests, endpoints and metrics.

python scripts/write_from_vllm.py            writes the file
python scripts/write_from_vllm.py --check    fails if it differs
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/from-vllm.md"

PATHS: Mapping[str, str] = {
    "/v1/chat/completions": "",
    "/v1/completions": "",
    "/v1/embeddings": "",
    "/v1/models": "",
    "/v1/responses": "",
    "/v1/messages": "",
    "/v1/batches": "",
    "/v1/files": "",
    "/v1/audio/transcriptions": "audio is not served",
    "/v1/audio/translations": "audio is not served",
    "/v1/realtime": "websockets are not served",
    "/tokenize": "",
    "/detokenize": "",
    "/tokenizer_info": "",
    "/pooling": "",
    "/classify": "no classifier's head is computed, and a checkpoint of one is refused",
    "/score": "",
    "/v1/score": "",
    "/rerank": "",
    "/v1/rerank": "",
    "/v2/rerank": "",
    "/health": "",
    "/ping": "",
    "/load": "",
    "/version": "",
    "/metrics": "",
    "/invocations": "",
    "/sleep": "",
    "/wake_up": "",
    "/is_sleeping": "",
    "/reset_prefix_cache": "",
    "/reset_mm_cache": "text alone is served",
    "/v1/load_lora_adapter": "",
    "/v1/unload_lora_adapter": "",
    "/collective_rpc": "no code is run by name",
    "/server_info": "`/stats` tells what can be told",
    "/start_profile": "",
    "/docs": "the page would load scripts from elsewhere; `/openapi.json` is served",
}
"""Paths of vLLM's server → why one is not served, if there is a reason."""


BUT = {
    "--served-model-name": "; without it the name of the checkpoint's folder, where vLLM has the path as it was typed",
}
"""Flags of vLLM that are the same here → in what they differ where they are left out."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def flags() -> str:
    """The tables of flags."""
    from ttpu_serve.cli.vllm_flags import IGNORED, PARALLEL, REFUSED, RENAMED, SAME, SHORT

    short: dict[str, str] = {}
    for one, name in SHORT.items():
        short[name] = f", `{one}`"
    rows = [(f"`{name}`{short.get(name, '')}", f"the same{BUT.get(name, '')}") for name in SAME]
    rows += [(f"`{name}`{short.get(name, '')}", one.told) for name, one in RENAMED.items()]
    for name, axis in PARALLEL.items():
        told = "--parallelism-strategy tensor=N" if axis == "tensor" else "1 alone: a replica is a server of its own"
        rows.append((f"`{name}`{short.get(name, '')}", told))
    for name, ignored in IGNORED.items():
        values = "" if ignored.values is None else f" ({', '.join(f'`{one}`' for one in ignored.values)} alone)"
        rows.append((f"`{name}`{short.get(name, '')}", f"no effect{values}: {ignored.reason}"))
    rows += [(f"`{name}`{short.get(name, '')}", f"refused: {one.reason}") for name, one in REFUSED.items()]
    return table(("vLLM's flag", "here"), sorted(rows))


def fields() -> str:
    """The tables of fields of requests."""
    from ttpu_serve.server.chat_protocol import ChatRequest
    from ttpu_serve.server.protocol import CompletionRequest, StreamOptions, StructuredOutputs

    kinds: dict[str, Any] = {"chat": ChatRequest, "completions": CompletionRequest}
    served: dict[str, list[str]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}
    ignored: dict[tuple[str, str], list[str]] = {}
    parts = {"stream_options": StreamOptions, "structured_outputs": StructuredOutputs}
    for where, kind in {**kinds, **parts}.items():
        before = f"{where}." if where in parts else ""
        for name in kind._names():
            served.setdefault(before + name, []).append(where)
        for name, (values, reason) in kind.neutral.items():
            if name not in kind._names():
                shown = ", ".join(f"`{value!r}`" for value in values)
                refused.setdefault((before + name, shown, reason), []).append(where)
        for name, (_, reason) in kind.harmless.items():
            if name not in kind._names():
                ignored.setdefault((before + name, reason), []).append(where)

    def of(places: list[str]) -> str:
        return "both" if set(places) == set(kinds) else places[0] if places[0] in kinds else "both"

    lists = [
        f"Served in {text}: "
        + ", ".join(f"`{name}`" for name in sorted(served) if of(served[name]) == place)
        + "."
        for place, text in (
            ("both", "chats and completions"), ("chat", "chats alone"), ("completions", "completions alone"),
        )
    ]  # fmt: skip
    return "\n\n".join(
        [
            *lists,
            "Refused by name, unless with a value that means nothing:",
            table(
                ("field", "of", "accepted", "why, and what to do"),
                [(f"`{name}`", of(where), values, why) for (name, values, why), where in sorted(refused.items())],
            ),
            "Ignored, and named in the header `X-TTPU-Warning`:",
            table(
                ("field", "of", "why"),
                [(f"`{name}`", of(where), why) for (name, why), where in sorted(ignored.items())],
            ),
        ]
    )


def endpoints() -> str:
    """The table of paths."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "plugins/ttpu-serve/tests")]
    from fake_core import FakeCore, tokenizer

    from ttpu_serve.api.async_engine import AsyncEngine
    from ttpu_serve.server import ServerSettings, create_app

    with tempfile.TemporaryDirectory() as folder:
        core: Any = FakeCore(tokenizer(Path(folder)))
        engine = AsyncEngine(core)
        open_to_all = set(create_app(engine).openapi()["paths"])
        app = create_app(engine, ServerSettings(enable_admin=True))
    served = set(app.openapi()["paths"])
    rows = []
    for path, reason in PATHS.items():
        if path in served and not reason:
            rows.append((f"`{path}`", "served" if path in open_to_all else "with `--enable-admin`"))
        else:
            rows.append((f"`{path}`", f"not served{': ' + reason if reason else ''}"))
    return table(("vLLM's path", "here"), rows)


def metrics() -> str:
    """The table of metrics."""
    from ttpu_serve.server.metrics import VLLM_NAMES

    rows = [(f"`vllm:{name}`", f"`ttpu:{own}`") for own, names in VLLM_NAMES.items() for name in names]
    return table(("vLLM's name", "TTPU's name"), sorted(rows))


PARTS = {"flags": flags, "fields": fields, "endpoints": endpoints, "metrics": metrics}


def filled(text: str) -> str:
    """The document with its parts written anew."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"docs/from-vllm.md has no part {name}"
        text = f"{before}{begin}{part()}\n{end}{after}"
    return text


def main() -> int:
    """Write or check the document."""
    before = DOCUMENT.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("docs/from-vllm.md differs from the code: run `python scripts/write_from_vllm.py`", file=sys.stderr)
        return int(after != before)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
