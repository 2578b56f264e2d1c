"""The survey as a page of Markdown that a user can search."""

from __future__ import annotations

from collections.abc import Iterable

from ttpu_conformance.survey.rows import ALLOWED, WAYS, Row, Survey, Way
from ttpu_conformance.survey.types import exclusions, surveyed_types

HEADINGS = {
    "native": "a plugin describes it: the full speed of TTPU, serving, planning, training",
    "fallback": "`ttpu-any` runs transformers' own code on JAX",
    "torch_xla": "`backend=\"torch_xla\"` runs transformers' own code",
    "refused": "refused, with the reason",
    "not tried": "no tiny model could be made, so that nothing is known",
}


def page(survey: Survey) -> str:
    """The page: shares, a table of the decoders of text, one of encoders that were run as decoders, and what is
    excluded."""
    known = surveyed_types()
    excluded = {name: each for each in exclusions() for name in each.types}
    rows = [survey.rows[name] for name in known if name in survey.rows and name not in excluded]
    encoders = [survey.rows[name] for name in known if name in survey.rows and name in excluded]
    missing = [name for name in known if name not in excluded and name not in survey.rows]
    versions = ", ".join(f"{name} {version}" for name, version in survey.versions.items())
    return "\n".join(
        [
            "# Model support",
            "",
            f"Made by `ttpu conformance --survey`, which runs every causal language model of transformers in a tiny "
            f"size, with random weights, on CPU in float32: {versions}.",
            "",
            *_shares(rows, missing),
            "",
            "What the columns say:",
            "",
            *(f"* **{way}**: {HEADINGS[way]}." for way in WAYS),
            f"* **error**: the largest difference of logits from torch's, of 2 × 40 tokens; at most "
            f"{ALLOWED['native']:.0e} counts as equal for a native type, and {ALLOWED['fallback']:.0e} for the others.",
            "* **decodes**: 24 tokens, generated with a cache, are those that torch finds most likely when it reads "
            "the whole text (on torch_xla: are those of transformers' `generate`). *same length* means that prompts "
            "of different lengths are refused in one batch.",
            "* **TPU**: libtpu compiles the prefill and the decoding of the tiny model for a v5e chip. No TPU is "
            "needed for that, and none has run them.",
            "",
            "## Decoders of text",
            "",
            *_table(rows),
            "",
            "## Encoders, run as decoders",
            "",
            "With `is_decoder = true`, under which they see no tokens that follow. Without it they are refused.",
            "",
            *_table(encoders),
            "",
            "## Not counted",
            "",
            "Types of transformers' mapping that are no decoders of text:",
            "",
            *(f"* {', '.join(f'`{name}`' for name in each.types)}: {each.reason}." for each in exclusions()),
            "",
        ]
    )


def _shares(rows: list[Row], missing: list[str]) -> Iterable[str]:
    """The survey in numbers."""
    total = len(rows) + len(missing)
    yield f"Of {total} types that are decoders of text:"
    yield ""
    for way in WAYS:
        yield f"* {_share(_of(rows, way), total)} {way}"
    if missing:
        yield f"* {_share(missing, total)} not surveyed yet: {', '.join(f'`{name}`' for name in missing)}"
    yield f"* {_share([row for row in rows if row.equal], total)} have torch's logits"
    yield f"* {_share([row for row in rows if row.decodes and row.equal], total)} decode correctly"
    yield f"* {_share([row for row in rows if row.compiles], total)} compile for TPU"
    wrong = [row.model_type for row in rows if row.wrong]
    yield f"* {len(wrong)} run and compute something else than torch" + (f": {', '.join(wrong)}" if wrong else "")


def _of(rows: list[Row], way: Way) -> list[Row]:
    return [row for row in rows if row.way == way]


def _share(some: list[Row] | list[str], total: int) -> str:
    return f"**{len(some)}** ({len(some) / max(total, 1):.1%})"


def _table(rows: list[Row]) -> Iterable[str]:
    yield "| model type | class | how | error | decodes | TPU | reason |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        decodes = {None: "", True: "yes", False: "no"}[row.decodes] + (", same length" if row.padded is False else "")
        compiles = {None: "", True: "yes", False: "no"}[row.compiles]
        reason = "; ".join(each for each in (row.reason, row.compile_reason) if each).replace("|", "\\|")
        cells = (f"`{row.model_type}`", f"`{row.class_name}`", row.way, error, decodes, compiles, reason)
        yield f"| {' | '.join(cells)} |"
