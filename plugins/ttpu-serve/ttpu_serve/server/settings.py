"""What a server is told besides its engine. In: values of the command line; out: one frozen, checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttpu_core.errors import RequestError

MIB = 2**20


@dataclass(frozen=True)
class ServerSettings:
    """How requests are named, limited and answered.

    model_names: under which the model is served, the first one in answers; without any, the engine's own name.
    api_keys: one of them must come with every request but those for health, metrics and the page; none: anybody asks.
    chat_template: a Jinja template instead of the checkpoint's. tool_call_parser: the name of an
    installed parser, or auto: the one that knows the chat template. reasoning_parser: the name of an installed parser,
    which tells reasoning from content; None tells nothing apart.
    default_sampling: where a request leaves temperature, top_p, top_k, min_p or repetition_penalty out.
    max_prompt_tokens: the longest prompt, below what the engine's context allows.
    max_choices: answers of one request, all its prompts together. max_concurrent: requests that are worked on at once;
    more are refused with status 429. allow_priority: clients may say which requests come first.
    request_timeout, write_timeout, drain_timeout: seconds that one request may run, that a client may leave a piece of
    a stream unread, and that a shutdown waits for what runs. None waits for ever.
    enable_admin: sleep, wake up, reset the prefix cache and load adapters over HTTP.
    allowed_origins: other sites whose pages may call this server from a browser. page: serve the page at `/`.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 8 * MIB
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    max_concurrent: int = 1024
    allow_priority: bool = False
    request_timeout: float | None = 600.0
    write_timeout: float | None = 60.0
    drain_timeout: float | None = 30.0
    enable_admin: bool = False
    allowed_origins: tuple[str, ...] = ()
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "max_concurrent", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}, but 1 or more is needed: raise it.")
        for name in ("request_timeout", "write_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RequestError(f"{name} is {value}, but more than 0 seconds are needed: raise it, or leave it out.")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise RequestError("an API key is empty or not ASCII, as HTTP headers must be: choose another one.")

    @property
    def drain_seconds(self) -> int | None:
        """`drain_timeout` in whole seconds, as uvicorn takes it."""
        return None if self.drain_timeout is None else math.ceil(self.drain_timeout)
