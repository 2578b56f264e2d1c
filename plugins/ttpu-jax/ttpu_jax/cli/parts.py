"""Shows where the predicted time of compiled programs goes, by part of the model: as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttpu_core.pictures import PALETTE, write_figure

if TYPE_CHECKING:
    from rich.table import Table

    from ttpu_jax.aot.report import ProgramReport
    from ttpu_jax.aot.schedule import PartCost

KINDS: Mapping[str, Callable[[PartCost], float]] = {
    "compute": lambda one: one.breakdown.compute,
    "collectives": lambda one: one.breakdown.collective + one.breakdown.collective_wait,
    "waits for copies": lambda one: one.breakdown.copy_wait,
    "kernels, at least": lambda one: one.kernels,
    "waits for slices": lambda one: one.breakdown.dcn_wait,
    "waits for the host": lambda one: one.breakdown.host_wait,
}
"""What a core does, with its seconds in a part."""
IN_BACKGROUND: Mapping[str, Callable[[PartCost], float]] = {
    "in the background": lambda one: one.breakdown.collective_in_background,
    "between slices": lambda one: one.breakdown.dcn_in_background,
    "to and from the host": lambda one: one.breakdown.host_in_background,
}
"""What goes on beside the core, which waits for a part of it."""
SELDOM = frozenset({"waits for slices", "waits for the host", "between slices", "to and from the host"})
"""Of both, what is shown only where it takes time."""
SMALLEST = 0.001
"""Share of a program's time below which a part is not drawn."""


def name_of(report: ProgramReport) -> str:
    """What a program is called: its task, its size and its slice."""
    size = report.context if report.task == "decode" else report.tokens
    return f"{report.task} {report.batch} × {size} on {report.topology}"


def table_of(report: ProgramReport) -> Table:
    """Milliseconds of each part of a program, costliest first, and of all."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=name_of(report), title_justify="left", show_footer=True)
    whole = sum(one.seconds for one in report.parts)
    on_core, beside = _shown(KINDS, [report]), _shown(IN_BACKGROUND, [report])
    table.add_column("part", "all")
    table.add_column("ms", _ms(whole), justify="right")
    table.add_column("share", "", justify="right")
    for kind, seconds in (on_core | beside).items():
        table.add_column(kind, _ms(sum(map(seconds, report.parts))), justify="right")
    for one in report.parts:
        cells = [_ms(seconds(one)) for seconds in (on_core | beside).values()]
        share = f"{one.seconds / whole:.1%}" if whole else ""
        table.add_row(one.part.replace("_", " "), _ms(one.seconds), share, *cells)
    return table


def save_picture(reports: Sequence[ProgramReport], path: str | Path) -> None:
    """Draw one panel a program with a bar for each part, in the format of the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = _shown(KINDS, reports)
    shown = [[one for one in report.parts if one.seconds > SMALLEST * _seconds(report)] for report in reports]
    figure = Figure(figsize=(9, sum(0.9 + 0.32 * len(parts) for parts in shown) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(reports), 1, squeeze=False, height_ratios=[1 + len(parts) for parts in shown])[:, 0]
    for axis, report, parts in zip(panels, reports, shown, strict=True):
        names = [one.part.replace("_", " ") for one in parts]
        left = [0.0] * len(parts)
        for (kind, seconds), colour in zip(kinds.items(), PALETTE, strict=False):
            widths = [1e3 * seconds(one) for one in parts]
            axis.barh(names, widths, left=left, color=colour, label=kind, height=0.7)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        for row, one in enumerate(parts):
            axis.text(left[row], row, f"  {_ms(one.seconds)}", va="center")
        axis.set_xlim(0, max(left, default=0.0) * 1.12 or 1.0)
        axis.invert_yaxis()
        axis.set_title(f"{name_of(report)}: {_ms(_seconds(report))} ms", loc="left", fontsize="medium")
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds, predicted by the compiler's schedule")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(kinds), frameon=False)
    write_figure(figure, path)


def _shown(
    kinds: Mapping[str, Callable[[PartCost], float]], reports: Sequence[ProgramReport]
) -> dict[str, Callable[[PartCost], float]]:
    parts = [one for report in reports for one in report.parts]
    return {kind: seconds for kind, seconds in kinds.items() if kind not in SELDOM or any(map(seconds, parts))}


def _seconds(report: ProgramReport) -> float:
    return sum(one.seconds for one in report.parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds else "–"
