"""What tests of files and batches share: lines, uploads, and waiting for an end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from serving import until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def line(custom_id: str, url: str = CHAT, /, **body: Any) -> dict[str, Any]:
    """A request; `say` is what a chat without messages is to be answered with."""
    if url == CHAT:
        said = {"role": "user", "content": f"say: {body.pop('say', custom_id)}"}
        body = {"model": "fake", "messages": [said], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def upload(client: Any, content: bytes, name: str = "in.jsonl") -> Any:
    return client.files.create(file=(name, content), purpose="batch")


def begun(client: Any, content: bytes, endpoint: str = CHAT, **options: Any) -> Any:
    """A batch of a file with this content."""
    file = upload(client, content)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: Any, batch: Any) -> Any:
    """The batch when it has ended."""
    until(lambda: client.batches.retrieve(batch.id).status in ENDED, 20)
    return client.batches.retrieve(batch.id)


def done(client: Any, lines: Iterable[Any], endpoint: str = CHAT, **options: Any) -> Any:
    """A batch of lines, when it has ended."""
    return ended(client, begun(client, jsonl(lines), endpoint, **options))


def answers(client: Any, file_id: str | None) -> dict[str, Any]:
    """The lines of an output by their custom_id."""
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found
