"""Draws evaluations: what each model loses against the size of its weights, as PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ttpu_core.pictures import write_figure
from ttpu_quantize.evaluation import Evaluation

MIB = 2**20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""

MARKERS = "osD^vP*X"


def save_picture(rows: Sequence[Evaluation], path: str | Path, title: str) -> None:
    """Draw each model as a mark: perplexity, divergence and speed against the size of the weights."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    compared = any(row.divergence is not None for row in rows)
    figure = Figure(figsize=(10.5 if compared else 7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3 if compared else 2)
    for axis in panels:
        axis.set_xlabel("weights, MiB")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    for number, row in enumerate(rows):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        size = row.weight_bytes / MIB
        panels[0].plot(size, row.perplexity, **style, linestyle="none", markersize=9, label=row.name)
        panels[1].plot(size, row.tokens_per_second, **style, linestyle="none", markersize=9)
        if row.divergence is not None:
            panels[2].plot(size, max(row.divergence, 1e-9), **style, linestyle="none", markersize=9)
    panels[0].set_title("perplexity (lower is better)", fontsize="medium")
    panels[1].set_title("tokens/s through the model", fontsize="medium")
    panels[1].set_ylim(bottom=0)
    if compared:
        panels[2].set_title("KL divergence from the first, nats", fontsize="medium")
        panels[2].set_yscale("log")
        panels[2].set_xlim(panels[0].get_xlim())
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    write_figure(figure, path)
