"""What is written about a run. In: results, and the versions of everything that took part; out: JSON and a badge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from ttpu_conformance.runner import Result

DISTRIBUTIONS = ("ttpu-conformance", "ttpu-core", "ttpu-jax", "jax", "libtpu", "torch", "transformers")


@dataclass(frozen=True)
class Report:
    """A run: versions by distribution, the kind of device, and the results in order."""

    versions: dict[str, str | None]
    device: str
    level: str
    results: tuple[Result, ...]

    @property
    def counts(self) -> Counter[str]:
        """Results by status."""
        return Counter(result.status for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something was proven."""
        return not self.counts["failed"] and self.counts["passed"] > 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "suite": "ttpu-conformance",
            "versions": self.versions,
            "plugins": sorted({result.plugin for result in self.results}),
            "device": self.device,
            "level": self.level,
            "passed": self.passed,
            "counts": dict(self.counts),
            "results": [asdict(result) for result in self.results],
        }

    @classmethod
    def joined(cls, documents: Sequence[dict[str, Any]]) -> Report:
        """One report of several runs, from what `to_json` gave; versions and level are those of the last one."""
        results = tuple(Result(**result) for document in documents for result in document["results"])
        last = documents[-1]
        return cls(last["versions"], last["device"], last["level"], results)

    def badge(self) -> dict[str, Any]:
        """What shields.io reads from an endpoint."""
        counts = self.counts
        message = f"{counts['passed']} passed"
        for status in ("failed", "expected failure", "skipped"):
            if counts[status]:
                message += f", {counts[status]} {status}" + (
                    "s" if status.endswith("failure") and counts[status] > 1 else ""
                )
        color = (
            "red" if not self.passed else "yellow" if counts["expected failure"] or counts["skipped"] else "brightgreen"
        )
        return {"schemaVersion": 1, "label": "ttpu conformance", "message": message, "color": color}


def make_report(results: Sequence[Result], level: str) -> Report:
    """A report of results that were got in this process."""
    import jax

    kinds = sorted({device.device_kind for device in jax.devices()})
    return Report({name: _version(name) for name in DISTRIBUTIONS}, ", ".join(kinds), level, tuple(results))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
