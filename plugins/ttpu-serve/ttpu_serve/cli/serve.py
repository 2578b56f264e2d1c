"""`ttpu serve`: starts an OpenAI-compatible server for a checkpoint, with a web page for chat and metrics, and serves
until it is stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.commands import CONTEXT_SETTINGS
from ttpu_core.cli.console import note
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.errors import RequestError
from ttpu_serve.cli.answer_options import AnswerOptions, Guides, GuidesChoice, check_processes, opened
from ttpu_serve.cli.batch_options import BatchOptions
from ttpu_serve.cli.engine_options import ENGINE, EngineOptions
from ttpu_serve.cli.vllm_command import VllmCommand

SERVER, LIMITS = "Server", "Limits"
KEY_VARIABLE = "TTPU_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class MetricsPrefixChoice(StrEnum):
    """The names of metrics."""

    both = "both"
    ttpu = "ttpu"
    vllm = "vllm"


class LogLevel(StrEnum):
    """The server's log level."""

    error = "error"
    warning = "warning"
    info = "info"
    debug = "debug"


@with_option_groups
def serve(
    checkpoint: options.CheckpointPath = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: everywhere.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="0: any that is free.", rich_help_panel=SERVER)
    ] = 8000,
    uds: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Listen at a Unix domain socket instead.", rich_help_panel=SERVER),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Where a proxy serves this server: /llama.", rich_help_panel=SERVER)
    ] = "",
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A YAML file of options; those on the command line come first.", rich_help_panel=SERVER
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar=KEY_VARIABLE,
            help="Ask clients for this key; repeat for more. Better in the variable, which `ps` does not show.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    enable_admin: Annotated[
        bool,
        typer.Option(
            "--enable-admin", help="Sleep, wake up and load adapters over HTTP. Set a key.", rich_help_panel=SERVER
        ),
    ] = False,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A site whose pages may call this server; * for all; repeat for more.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            "--allowed-hosts",
            metavar="NAME",
            help="A name of this server, where it has no key; * for any; repeat for more.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page at /.", rich_help_panel=SERVER)] = False,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve https.", rich_help_panel=SERVER)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key.", rich_help_panel=SERVER)
    ] = None,
    metrics_prefix: Annotated[
        MetricsPrefixChoice, typer.Option(help="Names of metrics: ttpu:, vllm:, or both.", rich_help_panel=SERVER)
    ] = MetricsPrefixChoice.both,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send an OpenTelemetry span for each request.", rich_help_panel=SERVER),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Of the server.", rich_help_panel=SERVER)] = LogLevel.warning,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A line for each request.", rich_help_panel=SERVER)
    ] = False,
    *,
    answers: AnswerOptions,
    guides: Guides = GuidesChoice.isolated,
    engine: EngineOptions,
    strict_compile: Annotated[
        bool,
        typer.Option(
            "--strict-compile",
            help="Serve when all programs are compiled; one that is missing is an error.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    max_concurrent: Annotated[
        int, typer.Option(min=1, metavar="N", help="HTTP requests at once; more get 429.", rich_help_panel=LIMITS)
    ] = 1024,
    refusal_rate: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="N",
            help="Refusals of one address in a second; above it, answers to them are delayed. 0 is unlimited.",
            rich_help_panel=LIMITS,
        ),
    ] = 10.0,
    max_waiting: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Sequences that wait for a place; more get 429.", rich_help_panel=LIMITS),
    ] = 4096,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of a prompt; longer get 400.", rich_help_panel=LIMITS)
    ] = None,
    max_choices: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences of one request.", rich_help_panel=LIMITS)
    ] = 128,
    max_body_mib: Annotated[
        float | None,
        typer.Option(
            metavar="MIB",
            help="Of a request's body; larger get 413. 2, and 1 for each 32,768 tokens of the context, if left out.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of one address; 0: any.", rich_help_panel=LIMITS)
    ] = 4096,
    max_incomplete: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Requests of one address that arrive slowly; the oldest end.",
            rich_help_panel=LIMITS,
        ),
    ] = 64,
    allow_priority: Annotated[
        bool,
        typer.Option("--allow-priority", help="Let clients say which request comes first.", rich_help_panel=LIMITS),
    ] = False,
    request_timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds that a request may run; 0: any.", rich_help_panel=LIMITS)
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds that stopping waits for responses.", rich_help_panel=LIMITS)
    ] = 30.0,
    batches: BatchOptions,
    weights_dir: options.WeightsDir = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Another checkpoint, for its tokenizer.", rich_help_panel=options.MODEL),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A branch, tag or commit on the Hub.", rich_help_panel=options.MODEL),
    ] = None,
    loading: options.Loading,
    quiet: options.Quiet = False,
) -> None:
    """Serve a checkpoint to clients of OpenAI's API, with a page to chat at /.

    Takes vLLM's flags too, where they mean something: docs/from-vllm.md.
    Prints its URL when it is ready. Ctrl-C or SIGTERM lets running requests end
    first, a second Ctrl-C does not.

    Examples:

    \b
      ttpu serve ./llama-instruct
      ttpu serve ./llama-instruct --host 0.0.0.0 --port 80 --max-model-len 8192
      ttpu serve ./llama --parallelism-strategy tensor=8 --kv-cache-dtype int8
      ttpu serve ./llama --speculative ngram:4 --enable-lora poet=./poet-lora
      ttpu serve --config llama.yaml --port 8001
      TTPU_API_KEY=secret ttpu serve ./llama --served-model-name gpt-4

    \b
      from openai import OpenAI
      client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="secret")
    \f
    Raises:
        RequestError: the command was launched as several processes, which the backend's runner does not span, or an
            option is invalid.
    """
    from ttpu_core.cli.session import checkpoint_name
    from ttpu_serve.server.run import Place, run
    from ttpu_serve.server.settings import MIB, ServerSettings
    from ttpu_serve.server.traces import tracer_for

    assert config is None, "its options stand on the command line"
    _check_keys(api_key, "localhost" if uds else host, enable_admin)
    name = checkpoint_name(checkpoint, weights_dir)
    check_processes("ttpu serve")
    settings = ServerSettings(
        **answers.settings(name, revision),
        **batches.settings(),
        api_keys=tuple(api_key or ()),
        max_body_bytes=None if max_body_mib is None else int(max_body_mib * MIB),
        max_connections=max_connections or None,
        max_incomplete=max_incomplete,
        max_prompt_tokens=max_prompt_tokens,
        max_choices=max_choices,
        max_concurrent=max_concurrent,
        refusal_rate=refusal_rate or None,
        allow_priority=allow_priority,
        request_timeout=request_timeout or None,
        drain_timeout=drain_timeout or 0.001,
        metrics_prefix=metrics_prefix.value,
        enable_admin=enable_admin,
        allowed_origins=tuple(allowed_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        root_path=root_path,
        page=not no_page,
    )
    certificate, private_key = (None if file is None else str(file) for file in (ssl_certfile, ssl_keyfile))
    place = Place(host, port, certificate, private_key, uds)
    arguments = engine.arguments() | loading.arguments()
    arguments |= {"max_waiting": max_waiting, "strict_compile": strict_compile, "guides": guides.value}
    arguments |= {} if revision is None else {"revision": revision}
    arguments["compile_meanwhile"] = not strict_compile
    bound = place.bind()
    tracer = None if otlp_traces_endpoint is None else tracer_for(otlp_traces_endpoint)
    app = _app(name, settings, arguments, quiet, tokenizer, tracer)

    def ready(url: str) -> None:
        print(
            f"serving {app.state.service.names[0]} at {url} (OpenAI API: {url}/v1, metrics: {url}/metrics)", flush=True
        )

    run(app, settings, place, bound, ready=ready, log_level=log_level.value, access_log=access_log)


def _check_keys(keys: list[str] | None, host: str, enable_admin: bool) -> None:
    """Check that a configured API key is not empty, and warn if the server is reachable by others without a key."""
    if keys:
        return
    if KEY_VARIABLE in os.environ:
        raise RequestError(
            f"the variable {KEY_VARIABLE} is set, but holds no key: put one into it, or unset it to serve without."
        )
    if host not in LOOPBACK:
        note(f"warning: everybody who reaches {host} may ask, for there is no API key: set {KEY_VARIABLE}.")
    if enable_admin:
        note(f"warning: everybody who may ask may administer, for there is no API key: set {KEY_VARIABLE}.")


def _app(name: str, settings: Any, options_: Mapping[str, Any], quiet: bool, tokenizer: str | None, tracer: Any) -> Any:
    """Load the model, compile its programs, and return the application."""
    from ttpu_serve.api.async_engine import AsyncEngine
    from ttpu_serve.server.app import create_app

    core = opened(name, settings, options_, quiet=quiet, tokenizer=tokenizer)
    app = create_app(AsyncEngine(core), settings, tracer)
    if not quiet:
        if not core.runner.limits.generates:
            note("this model is a text encoder, so that embeddings and scores are served, and no text.")
        elif app.state.service.chat.text is None:
            note("warning: the checkpoint has no chat template, so that no chats are served, only /v1/completions.")
    return app


app = typer.Typer(add_completion=False, context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)
app.command("serve", cls=VllmCommand)(serve)
