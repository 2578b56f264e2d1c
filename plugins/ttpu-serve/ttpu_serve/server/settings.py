"""Settings of a server besides its engine, as one frozen and checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_serve.server.metrics import PREFIXES, MetricsPrefix

MIB = 2**20
_COUNTS = (
    *("max_body_bytes", "max_prompt_tokens", "max_choices"),
    *("max_concurrent", "max_connections", "max_incomplete"),
    *("max_file_bytes", "max_files_bytes", "max_files", "max_batch_requests", "batch_concurrency"),
)


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and features of a server.

    model_names: names of the model, the first one in responses; if empty, the engine's own name.
    api_keys: keys of which every request needs one, except health, metrics and the page; if empty, none is needed.
    chat_template: a Jinja template that replaces the checkpoint's. chat_template_kwargs: its variables where a request
    does not say, such as {"enable_thinking": False}. tool_call_parser: name of an installed parser; auto
    selects the one that knows the chat template. reasoning_parser: name of an installed parser that separates reasoning
    from content; auto selects one by the chat template, none separates nothing.
    default_sampling: defaults for temperature, top_p, top_k, min_p and repetition_penalty.
    max_body_bytes: maximum size of a request's body; None is what fits the context: see `Service.most_body_bytes`.
    max_prompt_tokens: maximum prompt length, below the engine's own limit.
    max_connections: maximum connections of one address; None is unlimited. max_incomplete: maximum connections of one
    address that began a request more than a second ago and have not sent all of it; the oldest end.
    refusal_rate: refused requests (4xx) of one address in a second, above which answers to them wait up to 5 seconds,
    after two seconds' worth at once; None is unlimited.
    max_choices: maximum sequences of one request over all its prompts. max_concurrent: maximum concurrent requests;
    more are refused with status 429. allow_priority: clients may set priorities.
    request_timeout, write_timeout, drain_timeout: time limits in seconds of a request, of a client's reading one event,
    and of draining at shutdown. None is unlimited.
    strict_fields: refuse every field that is not known, also one without effect on an answer.
    metrics_prefix: the names of metrics: ttpu, vllm, or both.
    enable_admin: allow sleep, wake up, prefix cache reset and adapter loading over HTTP.
    allowed_origins: other sites whose pages may call this server from a browser. allowed_hosts: names under which a
    server without a key answers, beside addresses, localhost and this machine's own name; "*" is any.
    batches: serve /v1/files and /v1/batches. files_dir: a folder of the server's own, made if need be, for their files,
    which it finds there when it starts again; None is a temporary one. max_file_bytes: maximum size of an upload.
    max_files_bytes, max_files: maximum size of all files of one API key, and their number. max_batch_requests: maximum
    lines of a batch. batch_concurrency: sequences of batches that run at once; None is half of the engine's.
    root_path: the path under which a proxy serves this server, as in /llama. page: serve the page at `/`.

    Raises:
        RequestError: a value is out of range, or an API key is empty or not ASCII.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int | None = None
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    max_concurrent: int = 1024
    max_connections: int | None = 4096
    max_incomplete: int = 64
    refusal_rate: float | None = 10.0
    allow_priority: bool = False
    request_timeout: float | None = 600.0
    write_timeout: float | None = 60.0
    drain_timeout: float | None = 30.0
    strict_fields: bool = False
    metrics_prefix: MetricsPrefix = "both"
    enable_admin: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    batches: bool = True
    files_dir: str | None = None
    max_file_bytes: int = 200 * MIB
    max_files_bytes: int = 1024 * MIB
    max_files: int = 1000
    max_batch_requests: int = 50_000
    batch_concurrency: int | None = None
    root_path: str = ""
    page: bool = True

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}, but 1 or more is needed: raise it.")
        for name in ("request_timeout", "write_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RequestError(f"{name} is {value}, but more than 0 seconds are needed: raise it, or leave it out.")
        if self.refusal_rate is not None and not self.refusal_rate > 0:
            raise RequestError(
                f"refusal_rate is {self.refusal_rate}, but more than 0 are needed: raise it; None is unlimited."
            )
        if self.metrics_prefix not in PREFIXES:
            raise RequestError(
                f"metrics_prefix is {self.metrics_prefix!r}, but {', '.join(PREFIXES)} are known: use one of them."
            )
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise RequestError(f"root_path is {self.root_path!r}, but a path such as /llama is needed: correct it.")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise RequestError("an API key is empty or not ASCII, as HTTP headers must be: choose another one.")
