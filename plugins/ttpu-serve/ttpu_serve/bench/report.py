"""Prints the summary of a measurement as a table, or converts it to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ttpu_core.cli.console import counted, stdout_console
from ttpu_serve.bench.client import Timeline
from ttpu_serve.bench.offline import OfflineSummary
from ttpu_serve.bench.summary import Distribution, ServeSummary

LABELS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between pieces",
    "e2e": "whole response",
    "held": "held back here",
}
MOST_ERRORS = 8
NOTICED_MS = 5.0
"""Requests held back for less than this at the median are not worth a line."""


def as_json(summary: ServeSummary | OfflineSummary) -> dict[str, Any]:
    """Return a summary as JSON values: percentiles by name (`p50`), and the objectives as given."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: {f"p{point:g}": one for point, one in part.items()} if key == "percentiles" else plain(part)
                for key, part in value.items()
            }
        return list(value) if isinstance(value, tuple) else value

    result: dict[str, Any] = plain(asdict(summary))
    if isinstance(summary, ServeSummary):
        result["failed"] = summary.failed
    return result


def as_rows(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Return each request as JSON values, with times in seconds."""
    return [
        {
            "due": line.due,
            "sent": line.sent,
            "ttft": line.ttft,
            "tpot": line.tpot,
            "end": line.end,
            "prompt_tokens": line.prompt_tokens,
            "output_tokens": line.output_tokens,
            "gaps": line.gaps,
            "error": line.error,
        }
        for line in timelines
    ]


def print_serve(summary: ServeSummary, title: str) -> None:
    """Print rates, latencies and errors."""
    console = stdout_console()
    failed = f", {summary.failed:,} failed" if summary.failed else ""
    console.print(f"[bold]{title}[/bold]", markup=True)
    _facts(
        console,
        [
            ("requests", f"{summary.completed:,} succeeded{failed}, in {summary.seconds:.2f} s"),
            ("under way", f"{summary.mean_concurrency:.1f} on average, {summary.peak_concurrency:,} at most"),
            ("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out{_how(summary)}"),
            ("requests per second", f"{summary.request_rate:.2f}"),
            ("output tokens per second", f"{summary.output_token_rate:,.1f}"),
            ("all tokens per second", f"{summary.total_token_rate:,.1f}"),
        ],
    )
    if summary.goodput is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in summary.objectives.items())
        share = summary.goodput / summary.request_rate if summary.request_rate else 0.0
        _facts(console, [("goodput", f"{summary.goodput:.2f} requests per second ({share:.0%} meet {limits})")])
    rows = [(name, getattr(summary, name)) for name in LABELS]
    held = summary.held
    if held is not None and held.mean < NOTICED_MS:
        rows = rows[:-1]
    _latencies(console, [(LABELS[name], spread) for name, spread in rows if spread is not None])
    if summary.errors:
        shown = list(summary.errors.items())[:MOST_ERRORS]
        console.print(f"[bold red]{counted(summary.failed, 'error')}[/bold red]")
        for error, number in shown:
            console.print(f"  {number:,} × {error}", markup=False)
        if len(summary.errors) > len(shown):
            console.print(f"  and {len(summary.errors) - len(shown):,} other kinds")


def print_offline(summary: OfflineSummary, title: str) -> None:
    """Print rates and the time of the repetitions."""
    console = stdout_console()
    console.print(f"[bold]{title}[/bold]")
    seconds = sorted(summary.seconds)
    _facts(
        console,
        [
            ("requests", f"{summary.requests:,}, served {counted(len(seconds), 'time')}"),
            ("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"),
            ("seconds", f"{summary.latency.percentiles[50.0] / 1e3:.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f})"),
            ("requests per second", f"{summary.request_rate:.2f}"),
            ("output tokens per second", f"{summary.output_token_rate:,.1f}"),
            ("all tokens per second", f"{summary.total_token_rate:,.1f}"),
        ],
    )
    _latencies(console, [("whole batch", summary.latency)])


def _how(summary: ServeSummary) -> str:
    return "" if summary.tokens_counted else " (the server does not count them: each piece is taken for one)"


def _facts(console: Any, facts: Sequence[tuple[str, str]]) -> None:
    for name, value in facts:
        console.print(f"  {name:26}{value}", markup=False)


def _latencies(console: Any, rows: Sequence[tuple[str, Distribution]]) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    points = list(rows[0][1].percentiles)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("milliseconds")
    for name in ("mean", *(f"p{point:g}" for point in points), "max"):
        table.add_column(name, justify="right")
    for label, spread in rows:
        values = (spread.mean, *spread.percentiles.values(), spread.maximum)
        table.add_row(label, *(f"{value:,.2f}" for value in values))
    console.print(table)
