"""What a training file imports from a file beside it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.errors import RequestError
from ttpu_train.config_file import read_training_file
from ttpu_train.imports import imported

FILE = """
from pathlib import Path
ran = Path(__file__).with_suffix(".ran")
ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
def rows(): return [{"prompt": "a"}]
def judge(completions, **_): return [float(len(one)) for one in completions]
class Judges:
    judge = staticmethod(judge)
"""


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tests import is forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def one(folder: Path, target: str) -> Any:
    return imported(target, folder, "the reward function", "a function")


def test_a_file_runs_once_and_its_functions_can_be_sent_to_processes(tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(FILE)
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: m\nmethod: grpo\ntrain_dataset: {import: 'own_rewards.py:rows'}\n"
        "reward_funcs: [{import: 'own_rewards.py:judge'}, {import: './own_rewards.py:Judges.judge'}]\n"
    )
    first, second = read_training_file(run).arguments["reward_funcs"]
    assert first is second and (tmp_path / "own_rewards.ran").read_text() == "x"
    assert sys.modules["own_rewards"].judge is first
    assert pickle.loads(pickle.dumps(first)) is first
    script = "import pickle, sys; sys.path.append(sys.argv[1]); print(pickle.loads(bytes.fromhex(sys.argv[2]))(['ab']))"
    command = [sys.executable, "-S", "-c", script, sys.path[-1], pickle.dumps(first).hex()]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "[2.0]\n"


def test_files_of_one_name_and_names_of_other_modules_stay_apart(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_rewards.py").write_text(f"def judge(): return {value}\n")
        (tmp_path / folder / "json.py").write_text(f"def judge(): return {value}\n")
    for name in ("own_rewards", "json"):
        assert [one(tmp_path / folder, f"{name}.py:judge")() for folder in ("a", "b", "a")] == [1, 2, 1]
    assert one(tmp_path, "json:dumps")([]) == "[]"
    (tmp_path / "tabnanny.py").write_text("def judge(): return 3\n")  # of a module that was not imported yet
    assert one(tmp_path, "tabnanny.py:judge")() == 3 and callable(one(tmp_path, "tabnanny:check"))


def test_a_file_that_fails_is_told_of_and_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "own_rewards.py"
    file.write_text("{}['x']\n")
    with pytest.raises(RequestError, match=r"'own_rewards.py:judge' was to be imported.* failed \(KeyError: 'x'"):
        one(tmp_path, "own_rewards.py:judge")
    file.write_text("def judge(): return 1\n# mended\n")
    assert one(tmp_path, "own_rewards.py:judge")() == 1
