"""`ttpu bench serve|throughput|latency`: measures a server, or an engine without a server."""

from __future__ import annotations

import typer

from ttpu_core.cli.commands import CONTEXT_SETTINGS
from ttpu_serve.cli.bench_offline import latency, throughput
from ttpu_serve.cli.bench_serve import serve

app = typer.Typer(
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("serve")(serve)
app.command("throughput")(throughput)
app.command("latency")(latency)


@app.callback()
def bench() -> None:
    """Measure a server, or this engine without one.

    Each command has examples, as in [bold]ttpu bench serve --help[/bold].
    """
