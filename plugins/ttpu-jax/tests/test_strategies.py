"""Every strategy gives the logits of one device, and leaves no large parameter whole that it could cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import strategies
from devices import xla_flags
from once import once
from strategies import (
    DEVICES,
    FAMILIES,
    GENERATE,
    GENERATING,
    IMPOSSIBLE,
    MESHES,
    OF_FAMILY,
    RULES,
    STRATEGIES,
    TOLERANCE,
    WITH_RULES,
)

CUTS_PARAMETERS = ("fsdp", "mp", "2d", "3d")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = once(tmp_path_factory, "strategies", said)
    return found


def said() -> Any:
    """What the script says of each family."""
    flags = {"XLA_FLAGS": xla_flags(max(max(counts) for counts in DEVICES.values())), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, strategies.__file__],
        env={**os.environ, **flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def impossible(family: str) -> list[tuple[str, int]]:
    """The strategies that no mesh of a number of devices can follow."""
    return [(strategy, count) for strategy, count in sorted(IMPOSSIBLE) if count in DEVICES[family]]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_device(report: dict[str, dict[str, Any]], family: str) -> None:
    errors = {name: row["error"] for name, row in report[family].items() if "error" in row}
    others = len(MESHES) + len(OF_FAMILY.get(family, ()))
    assert len(errors) == len(DEVICES[family]) * len(STRATEGIES) - len(impossible(family)) + others
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", GENERATING)
def test_greedy_tokens_are_those_of_one_device(report: dict[str, dict[str, Any]], family: str) -> None:
    possible = (*STRATEGIES, *MESHES, *OF_FAMILY.get(family, ()))
    generated = [strategy for strategy in GENERATE if strategy in possible]
    assert generated and all(report[family][f"{strategy}@8"]["same_tokens"] for strategy in generated)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_RULES)
def test_a_user_s_own_rules_change_no_logits(report: dict[str, dict[str, Any]], family: str) -> None:
    errors = [row["rules_error"] for row in report[family].values() if "rules_error" in row]
    assert len(errors) == len(RULES) and max(errors) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_devices_cannot_form_is_refused(report: dict[str, dict[str, Any]], family: str) -> None:
    refused = {name: row["refused"] for name, row in report[family].items() if "refused" in row}
    assert refused.keys() == {f"{strategy}@{count}" for strategy, count in impossible(family)}
    assert all("cannot be shared" in sentence for sentence in refused.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_large_parameter_lies_whole_by_accident(report: dict[str, dict[str, Any]], family: str) -> None:
    for name, row in report[family].items():
        strategy, _, count = name.partition("@")
        if strategy in CUTS_PARAMETERS and "error" in row and count != "1":
            assert row["large_and_whole"] == [], name
            assert row["share"] > 0.95, (name, row["share"])
