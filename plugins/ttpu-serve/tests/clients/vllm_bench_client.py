"""The requests of `vllm bench serve`, whose package is not installed here: vllm/benchmarks/lib/endpoint_request_func.py
(commit 02cfb534df56) writes them so, and reads the answers so."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import harness

COMMON = {
    "model": harness.MODEL,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}


def events(path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which ends with [DONE]."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "x-request-id": "bench-7"}
    asked = urllib.request.Request(harness.URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as response:
        assert response.headers["x-request-id"] == "bench-7"
        lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def check(found: list[Any], tokens: int) -> None:
    """Check what the benchmark reads of events: choices or usage, and the number of tokens."""
    assert sum(1 for one in found if one["choices"]) >= 2
    assert [one["usage"]["completion_tokens"] for one in found if not one["choices"]] == [tokens]


@harness.case
def completions() -> None:
    """`--backend openai`: streamed completions of texts and of token ids"""
    for prompt in ("The with statement", [5, 6, 7, 8]):
        body = {**COMMON, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": 11, "logprobs": None}
        check(events("/v1/completions", body), 11)


@harness.case
def chat() -> None:
    """`--backend openai-chat`: streamed chats whose content is a list of parts"""
    content = [{"type": "text", "text": "How do I open a file?"}]
    body = {**COMMON, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 11}
    check(events("/v1/chat/completions", body), 11)


@harness.case
def embeddings() -> None:
    """`--backend openai-embeddings`: embeddings of texts"""
    body = {"model": harness.MODEL, "input": "The with statement"}
    asked = urllib.request.Request(
        f"{harness.URL}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        assert json.load(response)["usage"]["prompt_tokens"] > 0


harness.main()
