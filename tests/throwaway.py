"""Distributions made for one test: in goes a few lines of Python and some metadata, out comes a wheel that uv installs
into a folder of the test's own, and a Python process that sees that folder beside the environment it runs in."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uv import find_uv_bin

UV = [find_uv_bin(), "--quiet", "--offline", "--no-cache", "--no-config"]
"""Installs in a tenth of pip's time, which dozens of tests would wait for."""

PRELUDE = """
import json, sys
from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import TTPUError

def records(**options):
    return [[r.group, r.name, r.distribution, r.state, r.reason] for r in default_registry().plugins(**options)]

def error(function):
    try:
        function()
    except TTPUError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"

def report(value):
    print(json.dumps(value))
"""


@dataclass(frozen=True)
class Distribution:
    """What a wheel holds: modules by file path, entry points by group, and the metadata that the registry reads."""

    name: str
    modules: Mapping[str, str]
    entry_points: Mapping[str, Mapping[str, str]]
    version: str = "1.0"
    requires: tuple[str, ...] = ("ttpu-core>=0.1",)

    def wheel(self, folder: Path) -> Path:
        """Write the wheel, by the binary distribution format of PEP 427."""
        stem = f"{self.name.replace('-', '_')}-{self.version}"
        info = f"{stem}.dist-info"
        requires = "".join(f"Requires-Dist: {text}\n" for text in self.requires)
        points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
            for group, names in self.entry_points.items()
        )
        files = {path: textwrap.dedent(text) for path, text in self.modules.items()} | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n{requires}",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: throwaway\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": points,
        }
        files[f"{info}/RECORD"] = "".join(_record(path, text) for path, text in files.items()) + f"{info}/RECORD,,\n"
        path = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path


def family(name: str, source: str = "", *, model_type: str | None = None, **metadata: Any) -> Distribution:
    """A distribution of one module that describes one model type."""
    module = name.replace("-", "_")
    points = {"ttpu.architectures": {model_type or module: module}}
    return Distribution(name, {f"{module}.py": source}, points, **metadata)


def patch_pack(name: str, source: str, **metadata: Any) -> Distribution:
    """A distribution of one module that is a patch pack of the same name."""
    module = name.replace("-", "_")
    return Distribution(name, {f"{module}.py": source}, {"ttpu.patch_packs": {name: module}}, **metadata)


@dataclass(frozen=True)
class Source:
    """A package's folder, as its author has it."""

    path: Path

    def wheel(self, folder: Path) -> Path:
        """Build the wheel with what is installed here, so that no network is needed."""
        options = ["build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder)]
        before = set(folder.glob("*.whl"))
        subprocess.run([*UV, *options, str(self.path)], check=True, capture_output=True, text=True, timeout=120)
        (made,) = set(folder.glob("*.whl")) - before
        return made


@dataclass(frozen=True)
class Environment:
    """A folder of installed distributions, seen by the Python processes that it starts."""

    site: Path

    @classmethod
    def install(cls, folder: Path, *distributions: Distribution | Source) -> "Environment":
        """Build the distributions and install them, from their wheels and from nowhere else."""
        site = folder / "site"
        wheels = [str(distribution.wheel(folder)) for distribution in distributions]
        options = ["pip", "install", "--no-index", "--no-deps", "--python", sys.executable, "--target", str(site)]
        subprocess.run([*UV, *options, *wheels], check=True, capture_output=True, text=True, timeout=120)
        return cls(site)

    def run(self, code: str, **variables: str) -> Any:
        """What `code` passes to `report`; `variables` are added to the environment."""
        return json.loads(self.python("-c", PRELUDE + textwrap.dedent(code), variables=variables))

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's variables without TTPU's own, for a process that sees these distributions, and `variables`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TTPU_")}
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        return environment | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}

    def ttpu(self, *arguments: str | Path, status: int = 0, timeout: float = 120, **variables: str) -> str:
        """What the command line prints, which must end with `status`."""
        command = ["-m", "ttpu_core.cli.main", *map(str, arguments)]
        return self.python(*command, variables=variables, status=status, timeout=timeout)

    def python(
        self, *arguments: str, variables: Mapping[str, str] | None = None, status: int = 0, timeout: float = 120
    ) -> str:
        """What a Python process that sees these distributions prints, which must end with `status`."""
        finished = subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(variables),
            cwd=self.site,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert finished.returncode == status, finished.stdout + finished.stderr
        return finished.stdout


def _record(path: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(text.encode())}\n"
