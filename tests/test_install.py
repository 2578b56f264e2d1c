"""What `make dist` builds, installed into an empty environment as a user installs it, runs the README's commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "examples" / "checkpoints" / "pydoc-llama"
CONFIG = ROOT / "plugins" / "ttpu-llama" / "ttpu_llama" / "configs" / "llama-3.1-8b.json"
INSTALLED = ["ttpu-core[jax,serve]", "ttpu-llama"]


HELPED = ("chat", "serve", "bench", "compile", "compile-report", "launch")
OTHERS = f"""
import json
from typer.testing import CliRunner
from ttpu_core.cli.main import app
from ttpu import LLM, SamplingParams

def run(*arguments):
    done = CliRunner().invoke(app, arguments, prog_name="ttpu")
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout

said = {{
    "list-plugins": run("list-plugins", "--json"),
    "plan": run("plan", {str(CONFIG)!r}, "--topology", "v5e:2x4", "--json"),
    "info": run("info", {str(CHECKPOINT)!r}),
    "doctor": run("doctor"),
    "launch": run("launch", "--nproc-per-node", "2", "--dry-run", "--", "ttpu", "list-plugins"),
}}
said |= {{command + " --help": run(command, "--help") for command in {HELPED!r}}}
llm = LLM(
    {str(CHECKPOINT)!r}, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, sequence_buckets=(2,),
    token_buckets=(16,), sampling_level="greedy", prompt_logprobs=False, progress=None,
)
params = SamplingParams(temperature=0, max_tokens=4)
said["LLM"] = llm.generate(["A function definition"], params)[0].outputs[0].text
llm.close()
print(json.dumps(said))
"""
"""The other commands, in one process, which is not what they are about; then the Python interface."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    variables = f"VENV_TEST={sys.prefix}", f"DIST={folder}"
    run("make", "-o", f"{sys.prefix}/.installed", "--no-print-directory", "dist", *variables, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what our wheels need of others, then our own names from the folder of wheels alone."""
    folder = tmp_path_factory.mktemp("installed")
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
    run(*install, *others(wheels, INSTALLED))
    run(*install, "--no-index", "--find-links", str(wheels), *INSTALLED)
    return folder / "venv" / "bin"


def test_every_distribution_gives_a_wheel_and_a_source_distribution(wheels: Path) -> None:
    folders = [ROOT, ROOT / "conformance", *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    names = {re.search(r'^name = "(.*)"', (path / "pyproject.toml").read_text(), re.M)[1] for path in folders}  # type: ignore[index]
    for pattern in ("*.whl", "*.tar.gz"):
        assert {path.name.split("-")[0].replace("_", "-") for path in wheels.glob(pattern)} == names


@pytest.mark.slow
def test_the_readmes_commands_run_from_wheels(environment: Path, tmp_path: Path) -> None:
    text = ttpu(environment, "generate", str(CHECKPOINT), "--prompt", "A function definition", "--max-new-tokens", "8")
    assert text.startswith(" is created by a function")
    said = json.loads(run(str(environment / "python"), "-c", OTHERS, cwd=tmp_path).splitlines()[-1])
    assert {"plan", "launch", "serve", "bench", "compile", "compile-report"} <= {
        one["name"] for one in flat(json.loads(said["list-plugins"]))
    }
    assert json.loads(said["plan"])
    assert "llama" in said["info"]
    assert "jax" in said["doctor"]
    assert all("Usage: ttpu" in said[f"{command} --help"] for command in HELPED)
    assert said["launch"].count("TTPU_COORDINATOR=") == 2
    assert said["LLM"].strip()


@pytest.mark.slow
def test_what_is_not_installed_is_named_with_what_brings_it(environment: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(environment / "ttpu"), "conformance", "llama"], capture_output=True, text=True, env=user(), cwd=tmp_path
    )
    assert done.returncode == 2
    assert "pip install ttpu-conformance" in done.stderr


def others(wheels: Path, asked: list[str]) -> list[str]:
    """The requirements of some of our distributions, and of those of ours that they need, which are not our own."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [Requirement(one) for one in asked]
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        (wheel,) = wheels.glob(f"{wanted.name.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
            stated = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
        for need in map(Requirement, stated):
            extras = [{"extra": extra} for extra in (*wanted.extras, "")]
            if need.marker is not None and not any(need.marker.evaluate(extra) for extra in extras):
                continue
            need.marker = None
            if need.name.startswith("ttpu-"):
                waiting.append(need)
            else:
                found[str(need)] = None
    return list(found)


def flat(listed: object) -> list[dict[str, str]]:
    assert isinstance(listed, dict | list)
    values = listed if isinstance(listed, list) else [one for each in listed.values() for one in each]
    return [one for one in values if isinstance(one, dict)]


def ttpu(environment: Path, *arguments: str) -> str:
    return run(str(environment / "ttpu"), *arguments)


def user() -> dict[str, str]:
    """The environment of a user's shell: nothing of this run's paths."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=user())
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
