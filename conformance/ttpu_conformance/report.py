"""Writes the report of a run: its results and the versions of all packages involved, as JSON and as a badge."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from ttpu_conformance.model_under_test import BackendUnderTest
from ttpu_conformance.runner import Result

DISTRIBUTIONS = ("ttpu-conformance", "ttpu-core", "torch", "transformers")


@dataclass(frozen=True)
class Report:
    """A run: versions by distribution, the kind of device, the results in order, the model types that have none yet,
    and the backend."""

    versions: dict[str, str | None]
    device: str
    level: str
    results: tuple[Result, ...]
    missing: tuple[str, ...] = ()
    backend: str = ""

    @property
    def counts(self) -> Counter[str]:
        """Results by status."""
        return Counter(result.status for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether the run is over, nothing failed, and something was proven of every model type that was asked
        anything."""
        return not self.missing and not self.counts["failed"] and not self.unproven and self.counts["passed"] > 0

    @property
    def unproven(self) -> dict[str, str]:
        """Model types without one passed check → a sentence that says so. Those of which nothing could be asked, and
        those whose plugin declares that they cannot be proven everywhere, are none of them."""
        by_type: dict[str, Counter[str]] = defaultdict(Counter)
        for result in self.results:
            by_type[result.model_type][result.status] += 1
        return {
            model_type: f"nothing was proven of {model_type!r}, since no check passed ({_counted(counts)}): run it "
            "where they can run, or ask for more checks."
            for model_type, counts in by_type.items()
            if not counts["passed"] and counts.keys() - {"not applicable", "expected skip"}
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite becomes None, which JSON has."""
        return {
            "suite": "ttpu-conformance",
            "versions": self.versions,
            "plugins": sorted({result.plugin for result in self.results}),
            "backend": self.backend,
            "device": self.device,
            "level": self.level,
            "passed": self.passed,
            "missing": list(self.missing),
            "unproven": self.unproven,
            "counts": dict(self.counts),
            "results": [_finite(asdict(result)) for result in self.results],
        }

    @classmethod
    def joined(cls, documents: Sequence[dict[str, Any]]) -> Report:
        """One report of several runs, from what `to_json` gave; versions and level are those of the last one."""
        results = tuple(Result(**result) for document in documents for result in document["results"])
        last = documents[-1]
        missing = tuple(name for document in documents for name in document.get("missing", ()))
        return cls(last["versions"], last["device"], last["level"], results, missing, last.get("backend", ""))

    def badge(self) -> dict[str, Any]:
        """Return the JSON that shields.io reads from an endpoint."""
        counts = self.counts
        message = f"{counts['passed']} passed"
        others = ("failed", "expected failure", "skipped", "expected skip")
        for status in others:
            if counts[status]:
                message += f", {counts[status]} {status}" + (
                    "s" if status.startswith("expected") and counts[status] > 1 else ""
                )
        if self.missing:
            message += f", {len(self.missing)} not run"
        color = "red" if not self.passed else "yellow" if any(counts[status] for status in others) else "brightgreen"
        return {"schemaVersion": 1, "label": "ttpu conformance", "message": message, "color": color}


def make_report(
    results: Sequence[Result], level: str, backend: BackendUnderTest, missing: Sequence[str] = ()
) -> Report:
    """A report of results that were got on a backend on this machine, without those of some model types."""
    versions = {name: _version(name) for name in (*DISTRIBUTIONS, *backend.distributions)}
    kinds = ", ".join(backend.device_kinds())
    return Report(versions, kinds, level, tuple(results), tuple(missing), backend.name)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def _finite(value: Any) -> Any:
    """The same plain value with None for infinities and what is not a number."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
