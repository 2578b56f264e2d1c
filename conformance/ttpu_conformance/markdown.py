"""Writes a report as Markdown, which makes `docs/conformance.md`: a table of model types, a table of compiled programs,
and every failure with its reason.

    python -m ttpu_conformance.markdown RESULTS.json... > docs/conformance.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ttpu_conformance.report import Report
from ttpu_conformance.runner import Result

GIB = 2**30
COLUMNS = (
    "model type",
    "variants",
    "passed",
    "not",
    "float32",
    "bfloat16 (allowed)",
    "in parts",
    "gradients",
    "sharded",
    "seconds",
)
NOTE = (
    "Compiled programs are what libtpu makes for slices that were not there: memory and exchanges are facts about the "
    "program, times are predictions, and nothing ran on a TPU."
)


def markdown(report: Report) -> str:
    """Return the whole document."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    plugins = ", ".join(sorted({result.plugin for result in report.results}))
    yield "# Conformance"
    yield ""
    yield f"Made by `ttpu conformance` (level {report.level}, on {report.device}). {versions}; {plugins}."
    yield ""
    yield ", ".join(f"{number} {status}" for status, number in report.counts.items()) + "."
    for sentence in report.unproven.values():
        yield from ["", f"**{sentence[0].upper()}{sentence[1:]}**"]
    numbers = [result for result in report.results if result.level != "compile"]
    if numbers:
        yield from _types(numbers)
    compiled = [result for result in report.results if result.level == "compile"]
    if compiled:
        yield from _programs(compiled)
    for status, title in (
        ("failed", "Failed"),
        ("expected failure", "Expected failures"),
        ("skipped", "Not proven here"),
        ("expected skip", "Not proven here, as declared"),
    ):
        found = [result for result in report.results if result.status == status]
        if found:
            yield from ["", f"## {title}", ""]
            yield from _reasons(found)


def _reasons(results: list[Result]) -> Iterator[str]:
    """A line for each reason that a variant has, with the checks that it holds for."""
    by_reason: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        by_reason[result.model_type, result.variant, result.reason].append(result.check)
    for (model_type, variant, reason), checks in by_reason.items():
        yield f"- `{model_type}` {variant}, {', '.join(checks)}: {reason}"


def _types(results: list[Result]) -> Iterator[str]:
    by_type: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_type[result.model_type].append(result)
    yield from ["", "## Model types", ""]
    yield "Errors are the largest of all variants, as shares of the logits' scale (of each gradient's, for gradients)."
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for model_type, members in by_type.items():
        passed = sum(result.status == "passed" for result in members)
        others = sum(result.status not in ("passed", "not applicable") for result in members)
        low = _worst(members, "bfloat16_logits")
        cells = [
            f"`{model_type}`",
            str(len({result.variant for result in members})),
            str(passed),
            str(others or ""),
            _error(_worst(members, "float32_logits")),
            _error(low) + (f" ({low.tolerance:.1e})" if low and low.tolerance else ""),
            _error(_worst(members, "cached_decode", "chunked_prefill")),
            _error(_worst(members, "gradients")),
            _error(_worst(members, "sharded_fsdp", "sharded_tensor", "sharded_experts")),
            f"{sum(result.seconds for result in members):.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _programs(results: list[Result]) -> Iterator[str]:
    yield from ["", "## Compiled for TPUs", "", NOTE, ""]
    yield "| model | program | slice | mesh | GiB a device | exchanges | predicted ms | compiled in s |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        name = result.variant.partition("@")[0]
        program = result.check.removeprefix("compiled_")
        about = result.details
        if not about:
            yield f"| {name} | {program} | {result.variant.partition('@')[2]} | **{result.status}** | | | | |"
            continue
        exchanged = ", ".join(f"{one['count']} {op}" for op, one in about["collectives"].items()) or "none"
        rows = f"{about['batch']} × {about['context']}"
        cells = [
            name,
            f"{program} {rows}",
            about["slice"],
            ", ".join(f"{axis}={size}" for axis, size in about["mesh"].items()),
            f"{about['peak_bytes'] / GIB:.2f} of {about['hbm_bytes'] / GIB:.2f}",
            exchanged,
            f"{about['predicted_seconds'] * 1e3:.1f}",
            f"{about['compile_seconds']:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _worst(results: list[Result], *checks: str) -> Result | None:
    """The result with the largest error among those of some checks; None where none measured anything."""
    measured = [result for result in results if result.check in checks and result.error is not None]
    return max(measured, key=lambda result: (result.error or 0.0) / (result.tolerance or 1.0), default=None)


def _error(result: Result | None) -> str:
    return "" if result is None or result.error is None else f"{result.error:.1e}"


if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    print(markdown(Report.joined([json.loads(Path(name).read_text()) for name in sys.argv[1:]])), end="")
