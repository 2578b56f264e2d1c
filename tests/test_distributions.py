"""The command that installs a missing family names the distribution that describes the model type."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ttpu_core import default_registry, distributions
from ttpu_core.cli.list_plugins import KINDS
from ttpu_core.distributions import FAMILIES, ZOO, family_of
from ttpu_core.plugin_records import ARCHITECTURES, COLLECTIONS, COMMANDS, GROUPS, SERVICES

ROOT = Path(__file__).parent.parent


def test_every_type_of_these_families_has_its_distribution() -> None:
    ours = {"ttpu-zoo", *FAMILIES.values()}
    records = [record for record in default_registry().plugins(ARCHITECTURES) if record.distribution in ours]
    described = {record.name: record.distribution for record in records}
    assert {name: family_of(name) for name in described} == described
    assert sorted(ZOO.split()) == sorted(name for name, distribution in described.items() if distribution == "ttpu-zoo")


def test_a_type_that_begins_like_one_of_the_zoo_has_none() -> None:
    assert [family_of(name) for name in ("gpt_neox_japanese", "phi4_multimodal", "llama9", "")] == [
        None, None, "ttpu-llama", None,
    ]  # fmt: skip


def test_every_group_of_entry_points_is_listed_and_documented() -> None:
    """Parsers, torch's runtimes and what the kit checks used to be in none of these, and no variable excluded them."""
    declared = {"ttpu.default_backends"}  # for other people's backends
    for file in (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"):
        points = tomllib.loads(file.read_text())["project"].get("entry-points", {})
        declared.update(group for group in points if group.startswith("ttpu."))
    documented = (ROOT / "docs" / "plugins.md").read_text().partition("\n## ")[0]
    assert set(KINDS) == set(GROUPS)
    assert declared <= {*GROUPS, COLLECTIONS}
    assert [group for group in (*GROUPS, COLLECTIONS) if f"`{group}`" not in documented] == []
    [services] = [line for line in documented.splitlines() if line.startswith(f"| `{SERVICES}`")]
    assert [name for name in distributions.SERVICES if f"`{name}`" not in services] == []


def test_ttpus_own_distributions_are_known_by_name() -> None:
    files = (ROOT / "pyproject.toml", ROOT / "conformance" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
    assert distributions.official() == {tomllib.loads(file.read_text())["project"]["name"] for file in files}


def test_every_command_of_a_plugin_has_the_distribution_that_brings_it() -> None:
    declared: set[str] = set()
    for file in (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"):
        declared.update(tomllib.loads(file.read_text())["project"].get("entry-points", {}).get(COMMANDS, {}))
    assert declared == set(distributions.COMMANDS)
