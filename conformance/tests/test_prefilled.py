"""`ttpu new-plugin --from`: what it writes of a type describes what that type's own plugin describes, and how far a
plugin got is told in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from ttpu_conformance.declaration import Declaration, Variant
from ttpu_conformance.scaffold import attempt, reference_model
from ttpu_conformance.scaffold.prefilled import module_text
from ttpu_conformance.scaffold.reference_model import Seen, look_at
from ttpu_conformance.tiny import written_config
from ttpu_core import ModelConfig, default_registry, defaults
from ttpu_core.architecture import Architecture, describe
from ttpu_core.cli.main import app
from ttpu_core.registry import _new_manager

RUNNER = CliRunner()
TYPES = (
    "arcee", "ernie4_5", "exaone4", "glm", "glm4", "olmo2", "phi", "phi3", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def kit_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type without a plugin has the kit's own sizes, whatever the zoo declares."""
    monkeypatch.setattr(reference_model, "tiny_declaration", lambda model_type: Declaration(model_type, "kit"))


def seen(model_type: str) -> Seen:
    return look_at(ModelConfig.from_dict({"model_type": model_type}))


def described(text: str, config: ModelConfig) -> Architecture:
    """What a module's hooks say of a config."""
    module = ModuleType("generated")
    exec(compile(text, "generated", "exec"), module.__dict__)
    manager = _new_manager()
    manager.register(defaults)
    manager.register(module)
    return describe(manager.hook, config, family="generated")


@pytest.mark.parametrize("model_type", TYPES)
def test_the_module_says_what_the_types_own_plugin_says(model_type: str) -> None:
    looked = seen(model_type)
    text = module_text(looked, model_type)
    assert looked.unknown == []
    for keys in ({}, {key: value is False for flags in looked.flags.values() for key, value in flags.items()}):
        config = written_config(Declaration(model_type, "test"), Variant("base", keys))
        own = default_registry().architecture(ModelConfig.from_dict(config))
        ours = described(text, ModelConfig.from_dict(config))
        assert ours.spec.layers == own.spec.layers
        assert (ours.spec.embedding, ours.spec.head, ours.spec.final_norm) == (
            own.spec.embedding, own.spec.head, own.spec.final_norm,
        )  # fmt: skip
        assert dict(ours.mapping.rules) == dict(own.mapping.rules)


def test_the_module_is_clean_for_ruff(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for model_type in ("gpt2", "olmoe"):
        (tmp_path / f"{model_type}.py").write_text(module_text(seen(model_type), model_type))
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--line-length=120", "--select=E,F,W,I,B,UP"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_not_recognised_is_named_with_its_hook() -> None:
    looked = seen("xglm")  # it adds sinusoids to its embeddings
    assert ["ttpu_embedding" in sentence for sentence in looked.unknown] == [True]
    assert "- what is done to embeddings" in module_text(looked, "xglm")


def test_the_command_writes_the_module_and_leaves_the_check_out_on_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xglm", "scale_embedding": False}))
    asked = ["new-plugin", "--from", str(tmp_path / "config.json"), "--directory", str(tmp_path / "out"), "--no-check"]
    result = RUNNER.invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["distribution"], said["model_types"]) == ("ttpu-xglm", ["xglm"])
    assert len(said["not_recognised"]) == 1 and "conformance" not in said
    assert "def ttpu_norm() -> NormSpec:" in (tmp_path / "out/ttpu_xglm/xglm.py").read_text()


def test_a_type_whose_family_has_its_name_gets_a_package_of_another_name(tmp_path: Path) -> None:
    """A second ttpu-mistral would take the place of the first, and could not be checked, because who excludes one
    excludes both."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    asked = ["new-plugin", "--from", str(tmp_path), "--directory", str(tmp_path / "out"), "--no-check", "--json"]
    result = RUNNER.invoke(app, asked)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["distribution"], said["package"]) == ("ttpu-mistral-own", "ttpu_mistral_own")
    assert "set TTPU_DISABLE_PLUGINS=ttpu-mistral." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "NAME, or --from"),
        (["--from", "{config}", "--model-type", "other"], "leave --model-type out"),
        (["--from", "{config}"], "no tiny model could be made"),
    ],
)
def test_what_cannot_be_scaffolded_is_refused_in_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "a_type_of_nobody"}))
    result = RUNNER.invoke(app, ["new-plugin", *(each.format(config=config) for each in arguments)], prog_name="ttpu")
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split()), result.output


def report(*results: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "results": [
            {"model_type": "xglm", "variant": "base", "check": check, "status": status, "reason": reason}
            for check, status, reason in results
        ]
    }


def test_the_hook_that_most_checks_name_is_suspected_first() -> None:
    found = attempt.read_report(
        report(
            ("a", "passed", ""),
            ("b", "failed", "look at `ttpu_rope`, `ttpu_norm` in /tmp/x/base"),
            ("c", "failed", "correct `ttpu_norm`"),
            ("d", "not applicable", "`ttpu_head`"),
        ),
        "/tmp/x",
    )
    assert (found.passed, list(found.failed), found.suspects) == (
        1, ["xglm-base-b", "xglm-base-c"], ("ttpu_norm", "ttpu_rope"),
    )  # fmt: skip
    first, second, *rest = found.sentences()
    assert "1 of 3 checks passed" in first and second == "look first at ttpu_norm, then at ttpu_rope"
    assert len(rest) == 2 and "/tmp/x" not in rest[0]


def test_a_plugin_that_passes_is_told_what_comes_next() -> None:
    found = attempt.read_report(report(("a", "passed", ""), ("b", "passed", "")))
    assert "2 of 2 checks passed; run" in found.sentences()[0]


def test_a_package_that_is_not_installed_is_found_as_if_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ttpu_mine").mkdir()
    (tmp_path / "ttpu_mine/__init__.py").write_text("")
    (tmp_path / "ttpu_mine/xglm.py").write_text("")
    run, listed = subprocess.run, list[dict[str, Any]]()

    def list_instead(command: list[str], **options: Any) -> Any:
        done = run([*command[:3], "list-plugins", "--json"], **options)
        listed.extend(json.loads(done.stdout))
        return subprocess.CompletedProcess(command, 1, "", "error: nothing was checked\n")

    monkeypatch.setattr(attempt.subprocess, "run", list_instead)
    found = attempt.attempt("ttpu-mine", "ttpu_mine", tmp_path, {"xglm": "ttpu_mine.xglm"}, ["ttpu-llama"])
    states = {each["distribution"]: each["state"] for each in listed}
    assert states["ttpu-mine"] == "available" and states["ttpu-llama"] != "available"
    assert found.sentences() == ["conformance could not be run: nothing was checked"]
