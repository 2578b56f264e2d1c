"""Sends requests to an OpenAI-compatible server and records a `Timeline` of each, also of requests that fail."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.bench.events import EventDecoder
from ttpu_serve.bench.workload import Prompt

if TYPE_CHECKING:
    import httpx

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
SAID_IN_CHAT = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""What a chunk of a chat may add to a reply; one that only opens it with a role is not a token."""


@dataclass
class Timeline:
    """The record of one request. Times are seconds from the start of the measurement.

    due: when the request should be sent; sent: when it was sent. chunks: arrival of each chunk of the response. end:
    end of the response. output_tokens: the server's count, or the number of chunks if the server does not count. error:
    why the request failed; None if it succeeded.
    """

    due: float
    sent: float
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    error: str | None = None

    @property
    def latency(self) -> float:
        """Seconds until the response was complete."""
        return self.end - self.sent

    @property
    def ttft(self) -> float | None:
        """Seconds until the first token."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None if there is only one."""
        if not self.chunks or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between successive chunks."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


class Client:
    """A client of one server.

    Args:
        url: the server's root, with or without `/v1`.
        extra: fields for the body of every request; they override those set here.
        timeout: seconds without data after which a request fails.

    Raises:
        RequestError: `url` is not the address of a web server.
        MissingDependencyError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: Endpoint = "completions",
        model: str | None = None,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                "`ttpu bench serve` was asked for, but it needs httpx, which is not installed: "
                '`pip install "ttpu-serve[bench]"` brings it.'
            ) from error
        self.url, self.endpoint, self.model = _root(url), endpoint, model
        self._extra, self._timeout = dict(extra or {}), timeout
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        self._timed_out = httpx.TimeoutException

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """Return the given model name, or the first model that the server lists.

        Raises:
            RequestError: the server does not respond or lists no model.
        """
        if self.model is None:
            try:
                response = await self._http.get(f"{self.url}/models")
                listed = response.json()["data"] if response.status_code == 200 else []
                found = f"its status was {response.status_code}: {_message(response.content)}"
            except (*self._errors, ValueError, KeyError, TypeError) as error:
                listed, found = [], self._describe(error)
            if not listed:
                raise RequestError(
                    f"{self.url}/models was asked for the server's models, but {found}: start the server, correct "
                    "--url or --api-key, or name the model with --model."
                )
            self.model = str(listed[0]["id"])
        return self.model

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON body of a prompt's request.

        Raises:
            RequestError: the prompt's form (token ids, text, or messages) does not fit the endpoint.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.max_tokens}
        if self.endpoint == "chat":
            if prompt.is_ids:
                raise RequestError("token ids were given, but chats are made of texts: use --endpoint completions.")
            content = prompt.content
            body["messages"] = list(content) if prompt.is_chat else [{"role": "user", "content": content}]
        else:
            if prompt.is_chat:
                raise RequestError("the dataset holds conversations of messages: use --endpoint chat.")
            body["prompt"] = list(prompt.content) if prompt.is_ids else prompt.content
        return {**body, "stream": True, "stream_options": {"include_usage": True}, **self._extra}

    async def send(self, prompt: Prompt, due: float, start: float) -> Timeline:
        """Send a request and read the response to its end. `start` is the start of the measurement by
        `time.perf_counter`.

        Errors of the server are recorded in the timeline.
        """
        body = self.body(prompt)
        line = Timeline(due, sent=time.perf_counter() - start, prompt_tokens=prompt.tokens)
        try:
            async with self._http.stream("POST", self.url + PATHS[self.endpoint], json=body) as response:
                if response.status_code != 200:
                    line.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
                else:
                    line.error = await self._read(response, line, start)
        except (*self._errors, ValueError, OSError) as error:
            line.error = self._describe(error)
        line.end = time.perf_counter() - start
        return line

    async def _read(self, response: httpx.Response, line: Timeline, start: float) -> str | None:
        """Record each event; return the error if the response is incomplete."""
        decoder, finished = EventDecoder(), False
        async for piece in response.aiter_bytes():
            now = time.perf_counter() - start
            for data in decoder.feed(piece):
                if data == b"[DONE]":
                    finished = True
                    continue
                event = json.loads(data)
                if not isinstance(event, dict):
                    return f"an event that is no object: {_short(data)}"
                if event.get("error"):
                    return f"error in the stream: {_message(data)}"
                finished |= _note(event, line, now)
        if not finished:
            return "the stream ended before the response did"
        return None if line.output_tokens else "a response without a token"

    def _describe(self, error: Exception) -> str:
        if isinstance(error, self._timed_out):
            return f"nothing came for {self._timeout:g} s ({type(error).__name__})"
        return f"{type(error).__name__}: {_short(str(error).encode())}" if str(error) else type(error).__name__


def _note(event: Mapping[str, Any], line: Timeline, now: float) -> bool:
    """Add an event to the timeline; return True if it completes the response."""
    finished = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if any(delta.get(name) for name in SAID_IN_CHAT) if isinstance(delta, Mapping) else choice.get("text"):
            line.chunks.append(now)
            if not line.counted:
                line.output_tokens += 1
        finished |= choice.get("finish_reason") is not None
    usage = event.get("usage")
    if isinstance(usage, Mapping):
        if isinstance(usage.get("completion_tokens"), int):
            line.output_tokens, line.counted = usage["completion_tokens"], True
        if isinstance(usage.get("prompt_tokens"), int):
            line.prompt_tokens = usage["prompt_tokens"]
    return finished


def _root(url: str) -> str:
    """Return the address of the endpoints; `/v1` is appended to an address without a version.

    Raises:
        RequestError: `url` is not the address of a web server.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise RequestError(f"--url {url!r} was given, but a server's address is needed, as in http://localhost:8000.")
    path = parts.path.rstrip("/")
    last = path.rpartition("/")[2]
    version = last[:1] == "v" and last[1:2].isdigit()
    return f"{parts.scheme}://{parts.netloc}{path}" + ("" if version else "/v1")


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the body itself."""
    try:
        value = json.loads(body)
        while isinstance(value, dict) and ("error" in value or "message" in value or "detail" in value):
            value = next(value[name] for name in ("error", "message", "detail") if name in value)
        return _short(str(value).encode())
    except ValueError:
        return _short(body)


def _short(text: bytes) -> str:
    return " ".join(text[:600].decode(errors="replace").split())[:200] or "nothing"
