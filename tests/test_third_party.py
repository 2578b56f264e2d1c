"""Packages as third parties make them: built and installed from wheels beside TTPU, found, used and proven with no
special treatment by anything in this repository."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from throwaway import Environment, Source

ROOT = Path(__file__).parent.parent
OLMO = ROOT / "examples/ttpu-olmo"
PACK = ROOT / "examples/ttpu-pack-attention"
ON_CPU = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with both examples, installed by pip from their wheels."""
    yield Environment.install(tmp_path_factory.mktemp("third-party"), Source(OLMO), Source(PACK))


def test_list_plugins_shows_both_and_both_import(installed: Environment) -> None:
    plugins = json.loads(installed.ttpu("list-plugins", "--check", "--json", TTPU_PLUGINS="ttpu-olmo,ttpu-pack-*"))
    kept = (plugin for plugin in plugins if plugin["state"] != "disabled" and "parser" not in plugin["kind"])
    ours = {(plugin["kind"], plugin["name"], plugin["state"]) for plugin in kept}
    assert ours == {("family", "olmo2", "loaded"), ("family", "olmo3", "loaded"), ("patch pack", "blockwise", "loaded")}


@pytest.mark.parametrize(
    ("config", "parameters", "windows"), [("olmo-2-7b", 7_298_617_344, 0), ("olmo-3-7b", 7_298_011_136, 24)]
)
def test_info_explains_the_published_models(config: str, parameters: int, windows: int, installed: Environment) -> None:
    facts = info(installed, config)
    assert facts["plugin"] == "ttpu-olmo 0.1.0"
    assert facts["parameters"]["total"] == parameters
    assert facts["kv_cache"]["layers_that_forget"] == windows
    assert facts["config_keys_ignored"] == []


def test_a_patch_pack_is_in_the_plan_where_it_is_named_and_nowhere_else(installed: Environment) -> None:
    plain, patched = info(installed, "olmo-3-7b"), info(installed, "olmo-3-7b", "--patch-pack", "blockwise")
    assert plain["patch_packs"] == []
    assert patched["patch_packs"] == ["blockwise (ttpu-pack-attention 0.1.0)"]
    assert "ttpu_pack_attention" not in json.dumps(plain["kernels"])
    kernels = [words for name, words in patched["kernels"]["operations"].items() if name.startswith("attention")]
    assert len(kernels) > 0
    assert all(words.startswith("ttpu_pack_attention.blockwise:attend: ") for words in kernels)


def info(environment: Environment, config: str, *arguments: str) -> dict[str, Any]:
    """What `ttpu info` says of a config that the installed package brings."""
    path = environment.site / f"ttpu_olmo/configs/{config}.json"
    return dict(json.loads(environment.ttpu("info", path, "--json", *arguments, **ON_CPU)))


def test_the_family_takes_130_lines() -> None:
    lines = sum(len(module.read_text().splitlines()) for module in (OLMO / "ttpu_olmo").glob("*.py"))
    assert lines <= 130


def test_nothing_in_ttpu_knows_of_either_package() -> None:
    folders = ("ttpu_core", "plugins", "conformance")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")]
    files = [path for path in files if "tests" not in path.parts]
    assert len(files) > 50
    assert [path for path in files if re.search(r"ttpu[-_](olmo|pack)", path.read_text())] == []


def test_the_family_was_begun_with_new_plugin() -> None:
    scaffold = pytest.importorskip("ttpu_conformance.scaffold.package_files")
    begun = dict(scaffold.NewPlugin.of("olmo", ("olmo2", "olmo3"), None).files())
    assert [file for file in begun if not (OLMO / file).is_file()] == []
    untouched = ("LICENSE", ".gitignore", ".github/workflows/test.yml", "tests/test_olmo_conformance.py")
    for file in untouched:
        assert (OLMO / file).read_text().lower() == begun[file].lower(), file


def test_the_familys_own_tests_pass(installed: Environment) -> None:
    own_tests(installed, OLMO / "tests/test_olmo.py")


@pytest.mark.slow
def test_the_packs_own_tests_pass(installed: Environment) -> None:
    own_tests(installed, PACK / "tests/test_blockwise.py")


def own_tests(environment: Environment, file: Path) -> None:
    """Run a package's tests against what is installed, and not against the folder that they are in."""
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment.python(*arguments, variables=ON_CPU, timeout=400)


RUNS = (
    ("olmo2",),
    ("olmo3", "--only", "float32_logits"),
    ("olmo3", "--patch-pack", "blockwise", "--only", "float32_logits", "--only", "greedy_tokens"),
)
CONFORMANCE = f"""
import json
from typer.testing import CliRunner
from ttpu_core.cli.main import app
said = [CliRunner().invoke(app, ["conformance", *words, "--level", "quick"]) for words in {RUNS!r}]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in said]))
"""
"""The command line in one process: importing torch, transformers and jax takes as long as the checks."""


@pytest.mark.torch
@pytest.mark.slow
def test_conformance_passes(installed: Environment) -> None:
    pytest.importorskip("ttpu_conformance")
    said = json.loads(installed.python("-c", CONFORMANCE, variables=ON_CPU, timeout=600).splitlines()[-1])
    for words, (status, shown, errors) in zip(RUNS, said, strict=True):
        assert status == 0, (words, shown, errors)
        assert "float32_logits" in shown and "failed" not in shown, (words, shown)
