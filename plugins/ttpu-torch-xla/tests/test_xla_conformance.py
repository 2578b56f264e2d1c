"""The conformance kit on this backend: every model type of the families has transformers' logits whatever the padding,
in one program, and transformers' greedy tokens from programs that are compiled once."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_xla")

from typer.testing import CliRunner
from xla_tiny import declared, model_types

from ttpu_conformance import parametrize_with_checks, pytest_door
from ttpu_core.cli.main import app

pytestmark = pytest.mark.torch

CHECKS = (
    "float32_logits", "windows_are_passed", "forward_is_one_program", "padding_invariance", "greedy_tokens",
    "decode_compiles_once",
)  # fmt: skip
OF_WRAPPERS = "float32_logits", "forward_is_one_program", "greedy_tokens"
"""Those of types that wrap another type's text model, of which the others are proven there."""
SHARDED = ("sharded_fsdp", "sharded_tensor", "sharded_experts")


@pytest.fixture(scope="module", autouse=True)
def patches_end_with_this_module() -> Iterator[None]:
    yield
    pytest_door.release()
    gc.collect()


def tests() -> list[Any]:
    """The checks of every type, with few layers, as each compiles its own programs."""
    marks = []
    for one in model_types():
        declaration = declared(one)
        checks = OF_WRAPPERS if "text_config" in declaration.base else CHECKS
        marks.append(parametrize_with_checks(one, backend="torch_xla", only=checks, declaration=declaration))
    return [parameter for mark in marks for parameter in mark.mark.args[1]]


@pytest.mark.parametrize(("case", "check"), tests())
def test_conformance(case: Any, check: Any) -> None:
    check(case)


def test_the_model_types_are_those_of_the_four_families() -> None:
    assert len(model_types()) == 27


def statuses(file: Path) -> set[str]:
    results = json.loads(file.read_text())["results"]
    assert results
    return {result["status"] for result in results}


@pytest.mark.slow
def test_the_command_proves_a_sparse_family_whose_attention_is_a_dense_ones_on_this_backend(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = ["conformance", "mixtral", "--backend", "torch_xla", "--jobs", "1"]
    command += [word for check in ("float32_logits", "greedy_tokens", "served_tokens") for word in ("--only", check)]
    finished = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert finished.exit_code == 0, finished.output
    assert statuses(file) == {"passed", "not applicable"}
    assert json.loads(file.read_text())["backend"] == "torch_xla"


@pytest.mark.slow
def test_a_model_on_eight_devices_has_the_logits_of_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "ttpu_core.cli.main", "conformance", "mixtral", "--backend", "torch_xla"]
    command += ["--jobs", "1", "--json", str(file), *(word for check in SHARDED for word in ("--only", check))]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert statuses(file) == {"passed"}
