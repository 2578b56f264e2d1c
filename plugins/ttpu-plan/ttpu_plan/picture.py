"""Draws the memory of plans as stacked bars against each device's memory, as one self-contained HTML file or, with
matplotlib, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from itertools import count
from pathlib import Path

from ttpu_core.files import write_whole
from ttpu_core.pictures import check_picture, unwritable, write_figure
from ttpu_core.sharding.hardware import GIB
from ttpu_plan.estimate import MemoryEstimate
from ttpu_plan.plan import Plan

NamedPlans = Sequence[tuple[str, Plan]]

ENDINGS = (".html", ".png")

COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "cache": "#e69f00",
    "activations": "#d55e00",
    "logits": "#cc79a7",
    "temporaries": "#999999",
    "sampling": "#f0e442",
}
"""Okabe and Ito's palette, which colour-blind people can tell apart."""

_LEFT, _WIDTH, _BAR, _GAP, _TOP = 250, 620, 24, 16, 46


def save_picture(plans: NamedPlans, path: str | Path, title: str) -> None:
    """Write the picture in the format of the file's ending.

    Raises:
        RequestError: another ending than .html or .png, or the file cannot be written.
        MissingDependencyError: PNG without matplotlib.
    """
    check_picture(path, ENDINGS)
    target = Path(path).expanduser()
    try:
        if target.suffix == ".html":
            write_whole(target, html_picture(plans, title))
        else:
            _save_png(plans, target, title)
    except OSError as error:
        raise unwritable(path, error) from error


def html_picture(plans: NamedPlans, title: str) -> str:
    """Return an HTML page with the drawing, in which the pointer shows the meaning of each part of a bar, and a table
    of all numbers."""
    scale, shown = _scale(plans), _categories(plans)
    height = _TOP + len(plans) * (_BAR + _GAP) + 40
    drawing = [_axis(scale, height)]
    for row, (name, plan) in enumerate(plans):
        drawing.append(_bar(name, plan, _TOP + row * (_BAR + _GAP), scale))
    legend = "".join(
        f'<span class="key"><i style="background:{COLOURS[part]}"></i>{part}</span>' for part in shown
    )
    header = "".join(f"<th>{part}</th>" for part in shown)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{getattr(plan.memory, part) / GIB:.2f}</td>" for part in shown)
        + f"<td>{plan.memory.total / GIB:.2f}</td><td>{plan.hbm_bytes / GIB:.2f}</td></tr>"
        for name, plan in plans
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em; max-width: 960px; }}
svg text {{ font: 12px system-ui, sans-serif; fill: currentColor; }}
svg {{ max-width: 100%; height: auto; }}
.key {{ margin-right: 1.2em; white-space: nowrap; }}
.key i {{ display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }}
table {{ border-collapse: collapse; margin-top: 1.5em; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2em .7em; text-align: right; border-bottom: 1px solid #8884; font-weight: normal; }}
td:first-child, th:first-child {{ text-align: left; padding-left: 0; }}
th {{ opacity: .7; }}
</style></head><body>
<h2>{escape(title)}</h2>
<p>Predicted memory of one device at the peak, in GiB. The mark is what a program may take.</p>
<div>{legend}</div>
<svg viewBox="0 0 {_LEFT + _WIDTH + 110} {height}" role="img" aria-label="{escape(title)}">{"".join(drawing)}</svg>
<table><tr><th>plan</th>{header}<th>total</th><th>available</th></tr>{rows}</table>
</body></html>
"""


def _categories(plans: NamedPlans) -> list[str]:
    names = [field.name for field in fields(MemoryEstimate)]
    return [name for name in names if any(getattr(plan.memory, name) for _, plan in plans)]


def _scale(plans: NamedPlans) -> float:
    """Bytes at the right edge."""
    return max(max(plan.memory.total, plan.hbm_bytes) for _, plan in plans) * 1.02


def _sizes(plan: Plan) -> str:
    return f"{plan.memory.total / GIB:.1f} of {plan.hbm_bytes / GIB:.1f}"


def _axis(scale: float, height: int) -> str:
    """Lines at round numbers of GiB (1, 2 or 5 times a power of ten), four to ten of them."""
    rounded = (first * 10.0**power for power in count(-1) for first in (1, 2, 5))
    step = next(one for one in rounded if one >= 0.5 and scale / GIB / one <= 10)
    marks = []
    number = 0.0
    while number * GIB <= scale:
        x = _LEFT + number * GIB / scale * _WIDTH
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 12}" y2="{height - 34}" stroke="#8884"/>'
            f'<text x="{x:.1f}" y="{height - 16}" text-anchor="middle">{number:g}</text>'
        )
        number += step
    return "".join(marks) + f'<text x="{_LEFT + _WIDTH + 12}" y="{height - 16}">GiB</text>'


def _bar(name: str, plan: Plan, y: int, scale: float) -> str:
    x, parts = float(_LEFT), []
    for part, size in plan.memory.parts().items():
        width = size / scale * _WIDTH
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{COLOURS[part]}">'
            f"<title>{part}: {size / GIB:.2f} GiB</title></rect>"
        )
        x += width
    limit = _LEFT + plan.hbm_bytes / scale * _WIDTH
    middle = y + _BAR / 2 + 4
    return (
        f'<text x="{_LEFT - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>{"".join(parts)}'
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - 5}" y2="{y + _BAR + 5}" stroke="currentColor" '
        f'stroke-width="2"><title>available: {plan.hbm_bytes / GIB:.2f} GiB</title></line>'
        f'<text x="{max(x, limit) + 8:.1f}" y="{middle}">{_sizes(plan)}</text>'
    )


def _save_png(plans: NamedPlans, target: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.45 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    names = [name for name, _ in plans]
    left = [0.0] * len(plans)
    for part in _categories(plans):
        sizes = [getattr(plan.memory, part) / GIB for _, plan in plans]
        axis.barh(names, sizes, left=left, color=COLOURS[part], label=part, height=0.6)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for row, (_, plan) in enumerate(plans):
        limit = plan.hbm_bytes / GIB
        axis.plot([limit, limit], [row - 0.42, row + 0.42], color="black", linewidth=2)
        axis.text(max(limit, left[row]), row, f"  {_sizes(plan)}", va="center")
    axis.set_xlim(0, _scale(plans) / GIB * 1.15)
    axis.invert_yaxis()
    axis.set_xlabel("GiB on one device at the peak, predicted; the mark is what a program may take")
    axis.set_title(title, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
    write_figure(figure, target)
