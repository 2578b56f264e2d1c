"""Checks that a plugin reads every form of config.json as transformers' config class does: absent keys, nulls, old
names, old rope parameters, and the files of published models."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.config_forms import Form, forms
from ttpu_conformance.config_reading import as_transformers_reads, read_by_both
from ttpu_conformance.errors import NotApplicable, fail
from ttpu_conformance.key_hooks import hooks_of_keys
from ttpu_conformance.measure import Measured
from ttpu_core.config import ModelConfig
from ttpu_core.config.key_audit import keys_ignored

SHOWN = 3
"""Differences that a message tells."""


@check("contract", quick="all")
def check_raw_json(case: Case) -> Measured:
    """A config.json with absent keys, nulls, old names or old rope parameters describes what transformers' own reading
    of it describes."""
    return _hold(case, forms(case))


@check("contract", scope="type", quick="all")
def check_published_json(case: Case) -> Measured:
    """Every config.json that the plugin lists as published describes what transformers' own reading of it describes,
    and all of its keys are read.

    Raises:
        CheckFailure: it describes another model, one side refuses it, or nobody reads a key.
        NotApplicable: the plugin lists none.
    """
    published = case.declaration.published
    if not published:
        raise NotApplicable("the plugin lists no published config")
    forms = [Form(f"the file {one.config.name}", json.loads(one.config.read_text("utf-8"))) for one in published]
    measured = _hold(case, forms, refusable=False)
    for form in forms:
        config = ModelConfig.from_dict(form.raw)
        case.describe(config)
        ignored = keys_ignored(config)
        if ignored:
            hooks = " or ".join(f"`{hook}`" for hook in hooks_of_keys(ignored)) or "the hook that it concerns"
            fail(f"nobody reads {', '.join(map(repr, ignored))} in {form.what}: correct {hooks} to read it.")
    return measured


def _hold(case: Case, forms: Iterable[Form], *, refusable: bool = True) -> Measured:
    """What is refused by either side, where nothing is read otherwise."""
    wrong: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {"refused by the plugin": [], "refused by transformers": []}
    declared = case.declaration.reads_otherwise
    unseen = set(declared) if case.is_base and refusable else set()
    for form in forms:
        reading = read_by_both(case, form.raw, form.without, renamed=form.renamed)
        if reading.status == "different" and declared:
            reading = read_by_both(case, as_transformers_reads(case, form.raw, declared))
            if reading.status == "same" and form.without is not None:
                unseen.discard(form.without)
        if reading.status == "different" or (not refusable and reading.status != "same"):
            said = reading.sentence.rstrip(".")
            hook = f": correct `{reading.hook}`" if reading.hook and f"correct `{reading.hook}`" not in said else ""
            wrong.setdefault(f"{said}{hook}", []).append(form.what)
        elif reading.status != "same":
            refused[reading.status].append(form.what)
    if unseen and not wrong:
        fail(
            f"{case.declaration.source} declares under reads_otherwise that a config without "
            f"{', '.join(sorted(unseen))} is read otherwise than transformers reads it, but it is not: take that out."
        )
    if wrong:
        told = [f"With {', or '.join(wheres[:SHOWN])}, {sentence}." for sentence, wheres in wrong.items()]
        more = f" So do {len(told) - SHOWN} more." if len(told) > SHOWN else ""
        texts = " ".join(told[:SHOWN])
        fail(f"the plugin reads a config.json otherwise than transformers' config class. {texts}{more}")
    note = "; ".join(f"{who}: {', '.join(dict.fromkeys(what))}" for who, what in refused.items() if what)
    return Measured(note=note, details={who: list(dict.fromkeys(what)) for who, what in refused.items() if what})
