"""Draws evaluations: what each model loses against the size of its weights, as PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.files import check_target
from ttpu_quantize.evaluation import Evaluation

MIB = 2**20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""

MARKERS = "osD^vP*X"


def check_picture_file(path: str | Path) -> None:
    """Check that the picture can be written, before anything is computed for it.

    Raises:
        RequestError: another ending than .png, or no file can be written there.
        MissingDependencyError: matplotlib is not installed.
    """
    if Path(path).suffix != ".png":
        raise RequestError(f"the picture {str(path)!r} was asked for, but it is written as .png: end its name so.")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            f"the picture {str(path)!r} was asked for, but it needs matplotlib, which is not installed: "
            '`pip install "ttpu-core[plot]"`.'
        )
    try:
        check_target(path)
    except OSError as error:
        raise RequestError(
            f"the picture was to be saved as {str(path)!r}, but it cannot be written ({error.strerror or error}): name "
            "a file in a folder that exists and may be written to."
        ) from error


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
    target = Path(path).expanduser()
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.absolute().parent) as folder:
        unfinished = Path(folder) / target.name
        figure.savefig(unfinished, dpi=150)
        unfinished.replace(target)
