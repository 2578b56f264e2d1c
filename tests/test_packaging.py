"""What a wheel holds: an editable install would hide a module that is left out."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from throwaway import UV

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {
    ".": {
        "ttpu.py",
        "ttpu_core/__init__.py",
        "ttpu_core/cli/main.py",
        "ttpu_core/py.typed",
    },
    "plugins/ttpu-jax": {"ttpu_jax/backend.py", "ttpu_jax/cli/compile_report.py", "ttpu_jax/py.typed"},
    "plugins/ttpu-torch-xla": {
        "ttpu_torch_xla/backend.py",
        "ttpu_torch_xla/cli/inspect.py",
        "ttpu_torch_xla/py.typed",
    },
    "plugins/ttpu-plan": {"ttpu_plan/planner.py", "ttpu_plan/py.typed"},
    "plugins/ttpu-launch": {"ttpu_launch/supervisor.py", "ttpu_launch/py.typed"},
    "plugins/ttpu-quantize": {"ttpu_quantize/making.py", "ttpu_quantize/py.typed"},
    "plugins/ttpu-train": {"ttpu_train/runner.py", "ttpu_train/py.typed"},
    "plugins/ttpu-serve": {"ttpu_serve/api/llm.py", "ttpu_serve/server/web/index.html", "ttpu_serve/py.typed"},
    "conformance": {
        "ttpu_conformance/cli.py",
        "ttpu_conformance/scaffold/templates/plugin/module.py.template",
    },
    "plugins/ttpu-llama": {"ttpu_llama/llama.py", "ttpu_llama/py.typed"},
}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_holds_its_modules_its_licence_and_nothing_else(folder: str, tmp_path: Path) -> None:
    # hatchling is installed with the tests, so that building needs no network
    options = ["--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(tmp_path)]
    command = [*UV, "build", *options, str(ROOT / folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert DISTRIBUTIONS[folder] <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {name.split("/")[0] for name in DISTRIBUTIONS[folder]}
