"""`ttpu new-plugin`: which names it takes, what it writes and where, and that what it writes works as it stands."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from throwaway import Environment, Source
from typer.testing import CliRunner

from ttpu_core import ModelConfig, default_registry, hookspecs
from ttpu_core.cli.main import app
from ttpu_core.spec import ArchitectureSpec

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with nothing in it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(*arguments: str | Path, status: int = 0) -> Any:
    result = RUNNER.invoke(app, ["new-plugin", *map(str, arguments)], prog_name="ttpu")
    assert result.exit_code == status, (result.exit_code, result.output, result.exception)
    return result


def made(*arguments: str | Path) -> dict[str, Any]:
    """What the command says of itself as JSON."""
    return dict(json.loads(run(*arguments, "--json").stdout))


def refused(*arguments: str | Path) -> str:
    """The sentence with which it refuses."""
    result = run(*arguments, status=2)
    assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return str(result.stderr)


def test_help_has_examples() -> None:
    assert "ttpu new-plugin olmo" in run("--help").stdout


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "distribution", "package", "model_type"),
    [
        ("olmo", "ttpu-olmo", "ttpu_olmo", "olmo"),
        ("OLMo", "ttpu-olmo", "ttpu_olmo", "olmo"),
        ("ttpu-olmo", "ttpu-olmo", "ttpu_olmo", "olmo"),
        ("smol.lm_3", "ttpu-smol-lm-3", "ttpu_smol_lm_3", "smol_lm_3"),
        ("4m", "ttpu-4m", "ttpu_4m", "4m"),
    ],
)
def test_names_are_normalised_as_package_indexes_do(
    name: str, distribution: str, package: str, model_type: str, folder: Path
) -> None:
    plugin = made(name)
    assert (plugin["distribution"], plugin["package"], plugin["model_types"]) == (distribution, package, [model_type])
    assert Path(plugin["directory"]) == folder / distribution
    assert package.isidentifier()


@pytest.mark.parametrize("name", ["", "-olmo", "olmo-", "ol mo", "ol/mo", "ölmo", "../olmo", "ttpu-"])
def test_a_name_that_no_package_can_have_is_refused(name: str, folder: Path) -> None:
    assert "PEP 508" in refused("--", name)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["core", "ttpu-jax", "Conformance", "torch_xla", "train", "any", "zoo", "Llama"])
def test_the_names_of_ttpus_own_parts_are_refused(name: str) -> None:
    assert "part of TTPU" in refused(name)


def test_the_name_of_an_installed_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "ttpu_olive-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ttpu-olive\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(info.parent)
    assert "ttpu-olive is installed already" in refused("olive")
    assert made("olive-own", "--model-type", "olive")["distribution"] == "ttpu-olive-own"


def test_each_model_type_gets_a_module_and_an_entry_point(folder: Path) -> None:
    types = ["olmo2", "gpt-sw3", "qwen2.5", "4m", "import"]
    plugin = made("many", *(argument for one in types for argument in ("--model-type", one)))
    project = tomllib.loads((folder / "ttpu-many/pyproject.toml").read_text())["project"]
    points = project["entry-points"]["ttpu.architectures"]
    assert plugin["model_types"] == list(points) == types
    assert list(points.values()) == [
        f"ttpu_many.{m}" for m in ("olmo2", "gpt_sw3", "qwen2_5", "model_4m", "model_import")
    ]
    for module in points.values():
        assert (folder / "ttpu-many" / f"{module.replace('.', '/')}.py").is_file()
    assert list(tomllib.loads((folder / "ttpu-many/ttpu_many/conformance.toml").read_text())) == types


@pytest.mark.parametrize("model_type", ["", "a b", "a=b", "[a]", "a:b", "-a"])
def test_a_model_type_that_no_entry_point_can_have_is_refused(model_type: str, folder: Path) -> None:
    assert "model_type" in refused("olmo", f"--model-type={model_type}")
    assert list(folder.iterdir()) == []


def test_model_types_that_would_share_a_module_are_refused() -> None:
    assert "'a-b' and 'a_b'" in refused("ab", "--model-type", "a-b", "--model-type", "a_b")


@pytest.mark.parametrize(
    ("author", "authors"),
    [
        ("Ada Lovelace <ada@example.org>", [{"name": "Ada Lovelace", "email": "ada@example.org"}]),
        ('Ada "the first" Lovelace', [{"name": 'Ada "the first" Lovelace'}]),
        ("Åda \\ Löve", [{"name": "Åda \\ Löve"}]),
    ],
)
def test_an_author_is_written_as_metadata_asks(author: str, authors: list[dict[str, str]], folder: Path) -> None:
    made("olmo", "--author", author)
    assert tomllib.loads((folder / "ttpu-olmo/pyproject.toml").read_text())["project"]["authors"] == authors


@pytest.mark.parametrize("author", ["", " ", "two\nlines"])
def test_an_author_without_a_name_on_one_line_is_refused(author: str) -> None:
    assert "--author" in refused("olmo", f"--author={author}")


# -- files -------------------------------------------------------------------------------------------------


def test_the_files_are_listed_and_no_placeholder_is_left(folder: Path) -> None:
    plugin = made("olmo")
    root = folder / "ttpu-olmo"
    assert plugin["files"] == sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert {"pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github/workflows/test.yml"} < set(plugin["files"])
    assert not any("%{" in (root / file).read_text() for file in plugin["files"])
    assert "$" not in (root / "pyproject.toml").read_text()


def test_the_next_steps_are_commands_that_can_be_copied(folder: Path) -> None:
    shown = run("olmo", "--directory", "my folder").stdout
    assert "cd 'my folder'" in shown and 'pip install -e ".[test]"' in shown and "ttpu conformance olmo" in shown
    assert (folder / "my folder/pyproject.toml").is_file()


def test_an_empty_directory_is_filled(folder: Path) -> None:
    (folder / "ttpu-olmo").mkdir()
    made("olmo")
    assert (folder / "ttpu-olmo/pyproject.toml").is_file()


def test_a_directory_that_holds_something_is_left_as_it_is(folder: Path) -> None:
    (folder / "ttpu-olmo").mkdir()
    (folder / "ttpu-olmo/mine").write_text("precious")
    assert "not empty" in refused("olmo")
    assert [path.name for path in folder.rglob("*")] == ["ttpu-olmo", "mine"]


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_a_file_in_the_way_is_named(directory: str, folder: Path) -> None:
    (folder / "file").write_text("")
    assert directory in refused("olmo", "--directory", directory)


def test_nothing_is_left_where_writing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    assert "No space left" in refused("olmo")
    assert list(folder.iterdir()) == []


def test_a_model_type_that_an_installed_plugin_describes_is_pointed_out() -> None:
    assert "TTPU_DISABLE_PLUGINS=ttpu-llama" in run("my-llama", "--model-type", "llama").stderr
    assert run("olmo9").stderr == ""


# -- what is written ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with a package as it is written, for a type that transformers runs by its llama classes."""
    folder = tmp_path_factory.mktemp("new-plugin")
    made("iquestcoder", "--directory", folder / "source")
    yield Environment.install(folder, Source(folder / "source"))


def test_the_package_builds_installs_and_is_found(installed: Environment) -> None:
    plugins = json.loads(installed.ttpu("list-plugins", "--check", "--json", TTPU_PLUGINS="ttpu-iquestcoder"))
    [found] = [plugin for plugin in plugins if plugin["distribution"] == "ttpu-iquestcoder"]
    assert (found["kind"], found["name"], found["state"]) == ("family", "iquestcoder", "loaded")
    assert (installed.site / "ttpu_iquestcoder/conformance.toml").is_file()
    assert (installed.site / "ttpu_iquestcoder/py.typed").is_file()


def test_the_package_describes_llamas_layout_as_it_stands(installed: Environment) -> None:
    config = tiny.CONFIG | {"model_type": "iquestcoder"}
    ours, llama = (
        installed.run(f"report(default_registry().architecture(ModelConfig.from_dict({c!r})).spec.num_parameters)")
        for c in (config, tiny.CONFIG)
    )
    assert ours == llama


def test_the_package_is_clean_for_ruff(folder: Path) -> None:
    pytest.importorskip("ruff")
    made("my-olmo", *(argument for n in range(9) for argument in ("--model-type", f"a_rather_long_model_type_{n}")))
    for command in (["check"], ["format", "--check"]):
        finished = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "ttpu-my-olmo"], capture_output=True, text=True
        )
        assert finished.returncode == 0, finished.stdout


EXAMPLE_CONFIG: dict[str, Any] = tiny.CONFIG | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_every_example_in_the_module_is_a_hook_that_answers(folder: Path) -> None:
    made("olmo")
    source = (folder / "ttpu-olmo/ttpu_olmo/olmo.py").read_text()
    written, examples = source.split("# The commonest differences.", 1)
    lines = examples.splitlines()[1:]
    code = written + "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    names = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert len(names) == 9
    module: dict[str, Any] = {"__name__": "examples"}
    exec(compile(code, "examples", "exec"), module)
    config = ModelConfig.from_dict(EXAMPLE_CONFIG)
    attention = module["ttpu_attention"](config, 0)
    assert (attention.window, attention.qkv_bias, attention.output_bias) == (16, True, False)
    values = {"config": config, "layer": 0, "attention": attention, "spec": plain_spec()}
    for name in names:
        wanted = inspect.signature(module[name]).parameters
        assert set(wanted) <= set(inspect.signature(getattr(hookspecs, name)).parameters), name
        assert module[name](**{argument: values[argument] for argument in wanted}) is not None, name


def plain_spec() -> ArchitectureSpec:
    return default_registry().architecture(ModelConfig.from_dict(tiny.CONFIG)).spec


def test_neither_torch_nor_jax_is_needed_to_write_a_package(folder: Path) -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'jax', 'flax', 'transformers'))); "
    code += "from ttpu_core.cli.main import main; sys.argv = ['ttpu', 'new-plugin', 'olmo']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert "ttpu-olmo is in ttpu-olmo" in done.stdout, done.stderr
    assert (folder / "ttpu-olmo/ttpu_olmo/olmo.py").is_file()


@pytest.mark.torch
@pytest.mark.slow
def test_the_package_of_a_llama_like_type_passes_its_conformance_as_it_stands(installed: Environment) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ttpu_conformance")
    only = ("--only", "float32_logits", "--only", "cached_decode", "--only", "config_keys_are_read")
    shown = installed.ttpu("conformance", "iquestcoder", *only, timeout=300, JAX_PLATFORMS="cpu")
    assert "float32_logits" in shown and "failed" not in shown
