"""`ttpu bench serve`: sends a workload to a server and reports the latencies that its clients see."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import print_json
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.errors import RequestError
from ttpu_serve.cli import bench_options
from ttpu_serve.cli.bench_options import RESULTS, SENDING, SERVER, WORKLOAD, ResultOptions, WorkloadOptions

if TYPE_CHECKING:
    from ttpu_serve.bench.client import Client, Timeline
    from ttpu_serve.bench.workload import Prompt

NO_RESPONSE = 1


class EndpointChoice(StrEnum):
    """The endpoint that receives the requests."""

    completions = "completions"
    chat = "chat"


@with_option_groups
def serve(
    url: Annotated[
        str, typer.Option(metavar="URL", help="The server, with or without /v1.", rich_help_panel=SERVER)
    ] = "http://localhost:8000",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Without it, the first that it lists.", rich_help_panel=SERVER)
    ] = None,
    endpoint: Annotated[EndpointChoice, typer.Option(help="Which is asked.", rich_help_panel=SERVER)] = (
        EndpointChoice.completions
    ),
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Sent as a bearer token.", rich_help_panel=SERVER),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Fields for every request, as in '{\"top_k\": 5}'.", rich_help_panel=SERVER),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0: greedy.", rich_help_panel=SERVER)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Outputs of full length; a field that TTPU and vLLM know.", rich_help_panel=SERVER
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="S", help="Silence after which a request has failed.", rich_help_panel=SERVER),
    ] = 600.0,
    *,
    workload: WorkloadOptions,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID",
            help="Counts and makes tokens of random texts; without it and --vocab-size, a prompt is so many words.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Send random token ids below N, not texts.", rich_help_panel=WORKLOAD),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(metavar="R", help="Requests per second; inf: all at once.", rich_help_panel=SENDING)
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(metavar="X", help="1: Poisson arrivals; less: bursts; more: steadier.", rich_help_panel=SENDING),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The most under way at once; others are held back.", rich_help_panel=SENDING
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests off the clock, before.", rich_help_panel=SENDING)
    ] = 1,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Goodput: responses within ttft:200,tpot:50,e2e:5000 (ms).", rich_help_panel=RESULTS
        ),
    ] = None,
    results: ResultOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw latencies over time and percentiles: .png, .svg.", rich_help_panel=RESULTS
        ),
    ] = None,
) -> None:
    """Send requests to any OpenAI-compatible server and measure what comes back.

    Latencies count from the moment a request is sent. Status 1 if no request succeeded.

    Examples:

    \b
      ttpu bench serve --url http://localhost:8000 --num-prompts 200 --request-rate 10
      ttpu bench serve --input-tokens 16-256 --output-tokens 16-128 --ignore-eos --max-concurrency 64
      ttpu bench serve --dataset sharegpt.json --endpoint chat --slo ttft:200,tpot:50 --plot latency.svg
    """
    from ttpu_core.pictures import check_picture
    from ttpu_serve.bench.client import Client
    from ttpu_serve.bench.machine import machine
    from ttpu_serve.bench.picture import save_picture
    from ttpu_serve.bench.report import as_json, as_rows, print_serve
    from ttpu_serve.bench.summary import parse_objectives, summarize
    from ttpu_serve.bench.workload import arrivals

    objectives = parse_objectives(slo)
    bench_options.positive("--request-rate", request_rate, "requests per second, or inf")
    bench_options.positive("--burstiness", burstiness, "a number above 0")
    if plot is not None:
        check_picture(plot)
    extra = _extra(extra_body)

    prompts = workload.prompts(tokenizer=tokenizer, vocab_size=vocab_size)
    first: list[Prompt] = []
    if warmup:  # of a dataset so many that some are others
        number = warmup + (0 if workload.dataset is None else len(prompts))
        other = replace(workload, num_prompts=number, seed=workload.seed + 1)
        first = _others(other.prompts(tokenizer=tokenizer, vocab_size=vocab_size), prompts, warmup)
    client = Client(
        url,
        endpoint=endpoint.value,
        model=model,
        api_key=api_key,
        extra={"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **extra},
        timeout=timeout,
    )
    moments = arrivals(len(prompts), request_rate, burstiness=burstiness, seed=workload.seed)
    timelines = asyncio.run(_send(client, prompts, moments, max_concurrency, first))
    summary = summarize(timelines, objectives=objectives, percentiles=results.points)
    settings = {
        "url": client.url,
        "model": client.model,
        "endpoint": endpoint.value,
        "request_rate": None if math.isinf(request_rate) else request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        **workload.settings(len(prompts)),
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "warmup": warmup,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "extra_body": extra,
        "timeout": timeout,
        "slo": slo,
    }
    document = {"benchmark": "serve", "settings": settings, "machine": machine(), "results": as_json(summary)}
    title = f"{client.model} at {client.url}, {_sending(request_rate, max_concurrency)}"
    results.write({**document, "requests": as_rows(timelines)})
    if plot is not None:
        save_picture(timelines, plot, title)
    if results.as_json:
        print_json(document)
    else:
        print_serve(summary, title)
    if not summary.completed:
        raise typer.Exit(NO_RESPONSE)


async def _send(
    client: Client, prompts: list[Prompt], moments: Any, max_concurrency: int | None, first: list[Prompt]
) -> list[Timeline]:
    """Determine the model, send the prompts in `first` to warm the server up, then send the others, with progress on
    stderr if it is a terminal."""
    from ttpu_serve.bench.load import send_all

    async with client:
        await client.find_model()
        if first:
            for line in await send_all(client, first, [0.0] * len(first)):
                if line.error is not None:
                    raise RequestError(
                        f"a first request was sent to {client.url}, but it failed ({line.error}): correct what it "
                        "names, or pass --warmup 0 to measure all the same."
                    )
        with bench_options.Bar("requests", len(prompts)) as advance:
            return await send_all(
                client,
                prompts,
                moments,
                max_concurrency=max_concurrency,
                on_done=lambda line: advance(line.error is not None),
            )


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"--extra-body {text!r} was given, but a JSON object is needed: correct it.")
    if value.get("n") not in (None, 1):
        raise RequestError(
            f"--extra-body asks for n={json.dumps(value['n'])} sequences, but one per request is measured: "
            "leave n out, and send more requests."
        )
    return value


def _others(drawn: list[Prompt], measured: list[Prompt], number: int) -> list[Prompt]:
    """Return `number` prompts for the warmup that are not measured, because the server's prefix cache would contain
    them; prompts of a dataset that has no others are reused."""

    def key(prompt: Prompt) -> Any:
        return json.dumps(prompt.content) if prompt.is_chat else prompt.content

    known = {key(prompt) for prompt in measured}
    others = [prompt for prompt in drawn if key(prompt) not in known]
    return ((others or measured) * number)[:number]


def _sending(rate: float, concurrency: int | None) -> str:
    how = "all at once" if math.isinf(rate) else f"{rate:g} requests per second"
    return how + (f", at most {concurrency:,} under way" if concurrency else "")
