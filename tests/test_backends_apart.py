"""Each backend works where the other is not installed, and both work in one process. The environments are fresh ones
that share this one's third-party files, without what must not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "examples" / "checkpoints" / "pydoc-llama"
PROMPT = "The with statement"
TORCH = ("torch", "functorch", "triton", "nvidia", "torchgen")
JAX = ("jax", "flax", "libtpu", "optax", "orbax")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed here"),
]


def environment_without(folder: Path, prefixes: Sequence[str], distributions: Sequence[str]) -> Path:
    """A fresh virtual environment with this one's packages except those whose names begin with one of `prefixes`, and
    except the editable `distributions`; returns its bin folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    (target,) = folder.glob("lib/python*/site-packages")
    left_out = tuple(name.replace("-", "_") for name in distributions)
    for site in dict.fromkeys(Path(str(dist.locate_file(""))) for dist in metadata.distributions()):
        if site.name != "site-packages":
            continue
        for entry in site.iterdir():
            name = entry.name.lower().lstrip("_")
            if not name.startswith((*prefixes, *left_out)) and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return folder / "bin"


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command with nothing of this process's environment that would lead back to its packages."""
    kept = ("HOME", "PATH", "TMPDIR", "LANG", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)


PROGRAM = """
import json, sys
from typer.testing import CliRunner
from ttpu_core.cli.main import app
said = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in said]))
"""


def ttpu(folder: Path, bin_folder: Path, *lines: Sequence[str | Path]) -> list[tuple[int, str, str]]:
    """Several command lines in one process of that environment: the status, stdout and stderr of each."""
    words = json.dumps([[str(word) for word in line] for line in lines])
    finished = run([bin_folder / "python", "-c", PROGRAM, words], folder)
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout.splitlines()[-1])
    return [(status, stdout, stderr) for status, stdout, stderr in said]


def generated(said: tuple[int, str, str]) -> list[int]:
    """The new token ids that `ttpu generate --json` printed."""
    status, stdout, stderr = said
    assert status == 0, stderr
    ids: list[int] = json.loads(stdout)["token_ids"]
    return ids


GENERATE = ("generate", CHECKPOINT, "--prompt", PROMPT, "--max-new-tokens", "8", "--json", "--dtype", "float32")


def test_each_backend_generates_the_same_where_the_other_is_not_installed(tmp_path: Path) -> None:
    without_jax = environment_without(tmp_path / "without_jax", JAX, ("ttpu-jax", "ttpu-conformance"))
    without_torch = environment_without(tmp_path / "without_torch", TORCH, ("ttpu-torch-xla", "ttpu-conformance"))
    for bin_folder, missing in ((without_jax, "jax"), (without_torch, "torch")):
        gone = run([bin_folder / "python", "-c", f"import {missing}"], tmp_path)
        assert "ModuleNotFoundError" in gone.stderr
    splash = (*GENERATE, "--backend", "torch_xla", "--attn-implementation", "splash_attention")
    on_torch_xla, without_jax_said, kernels = ttpu(
        tmp_path, without_jax, (*GENERATE, "--backend", "torch_xla"), (*GENERATE, "--backend", "jax"), splash
    )
    on_jax, without_torch_said = ttpu(tmp_path, without_torch, GENERATE, (*GENERATE, "--backend", "torch_xla"))
    assert len(generated(on_jax)) == 8
    assert generated(on_torch_xla) == generated(on_jax)

    for (status, _, refusal), package in (
        (without_jax_said, '"ttpu-core[jax]"'),
        (without_torch_said, '"ttpu-core[torch-xla]"'),
        (kernels, '"ttpu-torch-xla[kernels]"'),
    ):
        assert status == 2
        assert f"pip install {package}" in refusal


def test_both_backends_work_in_one_process(tmp_path: Path) -> None:
    checkpoint = tiny.llama_checkpoint(tmp_path / "llama", num_hidden_layers=1)
    code = f"""
import torch
from ttpu import AutoModelForTPU
ids = [[1, 5, 9, 2, 7]]
answers = []
for backend in ("jax", "torch_xla", "jax"):
    model = AutoModelForTPU.from_pretrained({str(checkpoint)!r}, backend=backend, dtype="float32")
    given = torch.tensor(ids) if backend == "torch_xla" else ids
    answers.append([int(token) for token in model.generate(given, max_new_tokens=6, do_sample=False)[0]])
assert answers[0] == answers[1] == answers[2], answers
print("same")
"""
    finished = run([sys.executable, "-c", code], tmp_path)
    assert finished.stdout.strip().endswith("same"), finished.stderr
