"""The docs' tables of predictions are those of the stored results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from ttpu_core.sharding.verification import MEASURED

ROOT = Path(__file__).parents[3]
DOC = ROOT / "docs/compile-report.md"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", ["published"], indirect=True)
def test_the_table_of_published_figures(script: ModuleType) -> None:
    stored = json.loads(script.RESULTS.read_text())["predicted_seconds"]
    assert {figure.what for figure in script.FIGURES} == set(stored)
    assert "\n".join(script.table(stored)) in DOC.read_text(encoding="utf-8")
    ratios = [figure.seconds / stored[figure.what] for figure in script.FIGURES]
    assert (round(min(ratios), 1), round(max(ratios), 1)) == MEASURED


@pytest.mark.parametrize("script", ["predictions"], indirect=True)
def test_the_tables_of_programs(script: ModuleType) -> None:
    stored = json.loads(script.RESULTS.read_text())
    assert {program.name for table in script.TABLES.values() for program in table} == set(stored)
    docs = DOC.read_text(encoding="utf-8") + (ROOT / "docs/training.md").read_text(encoding="utf-8")
    for name in script.TABLES:
        assert "\n".join(script.table_of(name, stored)) in docs, name


@pytest.mark.parametrize("script", ["peers"], indirect=True)
def test_the_table_of_peers(script: ModuleType) -> None:
    stored = json.loads(script.RESULTS.read_text())
    assert {f"{task} {name}" for task, name in script.PROGRAMS} == set(stored)
    assert "\n".join(script.table(stored, script.our_results())) in DOC.read_text(encoding="utf-8")
