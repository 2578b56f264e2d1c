"""Runs the conformance kit on a plugin that is not installed, and says how far it got."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttpu_core.plugin_records import DENY_VARIABLE

SHOWN = 600
"""Characters of a reason."""


@dataclass(frozen=True)
class Attempt:
    """How far a plugin got.

    Attributes:
        passed: the number of checks that passed.
        failed: the failed ones by name, with the reason.
        suspects: the hooks that the reasons name, those named by most checks first.
        trouble: why nothing could be checked; empty if something was.
    """

    passed: int
    failed: Mapping[str, str]
    suspects: tuple[str, ...] = ()
    trouble: str = ""

    def sentences(self) -> list[str]:
        """What a reader should know, a line each."""
        if self.trouble:
            return [f"conformance could not be run: {self.trouble}"]
        total = self.passed + len(self.failed)
        lines = [f"conformance at level quick: {self.passed} of {total} checks passed"]
        if not self.failed:
            return [f"{lines[0]}; run `ttpu conformance` at the level full before you publish"]
        if self.suspects:
            lines.append(f"look first at {self.suspects[0]}" + _besides(self.suspects[1:]))
        reasons = Counter(self.failed.values())
        for reason, count in reasons.most_common(3):
            name = next(check for check, each in self.failed.items() if each == reason)
            others = f" (and {count - 1} more)" if count > 1 else ""
            lines.append(f"failed {name}{others}: {reason[:SHOWN]}")
        return lines


def attempt(distribution: str, package: str, root: Path, points: Mapping[str, str], denied: Sequence[str]) -> Attempt:
    """Run the quick checks of a package's model types in a process that sees the package as if it were installed.

    Args:
        distribution: the package's name.
        package: the name of its import package, which lies in `root`.
        root: the package's folder.
        points: module by model type.
        denied: distributions that describe the same types and are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / f"{package}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n", "utf-8")
        lines = [f"{model_type} = {module}" for model_type, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[ttpu.architectures]", *lines, ""]), "utf-8")
        paths = [folder, str(root.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        others = [*filter(None, [os.environ.get(DENY_VARIABLE)]), *denied]
        report = Path(folder) / "report.json"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), DENY_VARIABLE: ",".join(others)}
        command = [
            sys.executable, "-c", "from ttpu_core.cli.main import app; app()", "conformance", *points,
            "--level", "quick", "--jobs", "1", "--json", str(report),
        ]  # fmt: skip
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not report.is_file():
            told = ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"]
            return Attempt(0, {}, trouble=told[-1].removeprefix("error: "))
        return read_report(json.loads(report.read_text("utf-8")), folder)


def read_report(report: Mapping[str, Any], folder: str = "") -> Attempt:
    """An attempt from the JSON of `ttpu conformance`. `folder` is left out of reasons."""
    failed: dict[str, str] = {}
    named: Counter[str] = Counter()
    for result in report["results"]:
        if result["status"] == "failed":
            reason = " ".join(str(result["reason"]).replace(folder or "\0", "").split())
            failed[f"{result['model_type']}-{result['variant']}-{result['check']}"] = reason
            named.update(set(re.findall(r"`(ttpu_[a-z_]+)`", reason)))
    passed = sum(result["status"] == "passed" for result in report["results"])
    order = {hook: index for index, hook in enumerate(_in_order(failed.values()))}
    return Attempt(passed, failed, tuple(sorted(named, key=lambda hook: (-named[hook], order[hook]))))


def _in_order(reasons: Any) -> list[str]:
    return list(dict.fromkeys(hook for reason in reasons for hook in re.findall(r"`(ttpu_[a-z_]+)`", reason)))


def _besides(hooks: Sequence[str]) -> str:
    return f", then at {', '.join(hooks)}" if hooks else ""
