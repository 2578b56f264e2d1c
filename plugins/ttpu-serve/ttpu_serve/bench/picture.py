"""Draws the latencies of a measurement as a PNG or SVG with two panels: when each request was sent and how long it
took, and each kind of latency by percentile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.pictures import write_figure
from ttpu_serve.bench.client import Timeline

COLOURS = {
    "whole response": "#0072b2",
    "first token": "#d55e00",
    "per output token": "#009e73",
    "between pieces": "#cc79a7",
}
"""Okabe and Ito's palette, which colour-blind people can tell apart."""


def save_picture(timelines: Sequence[Timeline], path: str | Path, title: str) -> None:
    """Write the picture; the file's suffix selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = [line for line in timelines if line.error is None]
    failed = [line for line in timelines if line.error is not None]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, over_percentiles = figure.subplots(1, 2)

    first = [(line.sent, line.ttft) for line in whole if line.ttft is not None]
    for label, points in (("whole response", [(line.sent, line.latency) for line in whole]), ("first token", first)):
        if points:
            x, y = zip(*points, strict=True)
            over_time.scatter(x, [1e3 * value for value in y], s=12, color=COLOURS[label], label=label, linewidths=0)
    if failed:
        sent, ends = [line.sent for line in failed], [1e3 * line.latency for line in failed]
        over_time.scatter(sent, ends, s=22, marker="x", color="black", label="failed")
    over_time.set_xlabel("sent, seconds from the start")

    series: dict[str, list[float | None]] = {
        "whole response": [line.latency for line in whole],
        "first token": [line.ttft for line in whole],
        "per output token": [line.tpot for line in whole],
        "between pieces": [gap for line in whole for gap in line.gaps],
    }
    for label, values in series.items():
        there = np.array([value for value in values if value is not None], float) * 1e3
        if there.size:
            shares = np.linspace(0, 100, 201)
            over_percentiles.plot(shares, np.percentile(there, shares), color=COLOURS[label], label=label)
    over_percentiles.set_xlabel("per cent that waited no longer")
    over_percentiles.set_xticks([0, 25, 50, 75, 90, 99], ["0", "25", "50", "75", "90", "99"])

    for axis in (over_time, over_percentiles):
        axis.set_ylabel("milliseconds")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        lowest, highest = axis.get_ylim()
        few = highest < 1000 * lowest
        axis.yaxis.set_minor_formatter(lambda x, _, few=few: f"{x:g}" if few and f"{x:e}"[0] in "25" else "")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, which="both", axis="y")
    shown: dict[str, Any] = {}
    for axis in (over_time, over_percentiles):
        shown |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles=list(shown.values()), labels=list(shown), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    write_figure(figure, path)
