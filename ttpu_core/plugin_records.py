"""The plugins of an environment as records, from the metadata of installed distributions; nothing is imported. A plugin
that was built for another core, or that the environment's variables exclude, has a record that says so."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

ARCHITECTURES = "ttpu.architectures"
COLLECTIONS = "ttpu.architectures.collection"  # architectures that yield to a distribution's own plugin for a type
BACKENDS = "ttpu.backends"
PATCH_PACKS = "ttpu.patch_packs"
COMMANDS = "ttpu.commands"
SERVICES = "ttpu.services"
LAUNCHES = "ttpu.launches"
DEFAULT_BACKENDS = "ttpu.default_backends"
FALLBACKS = "ttpu.fallbacks"
MODELS_UNDER_TEST = "ttpu.models_under_test"
TORCH_RUNTIMES = "ttpu.torch_runtimes"
TOOL_PARSERS = "ttpu.tool_parsers"
REASONING_PARSERS = "ttpu.reasoning_parsers"
GROUPS = (
    ARCHITECTURES, BACKENDS, PATCH_PACKS, COMMANDS, SERVICES, LAUNCHES, DEFAULT_BACKENDS, FALLBACKS, MODELS_UNDER_TEST,
    TORCH_RUNTIMES, TOOL_PARSERS, REASONING_PARSERS,
)  # fmt: skip

ALLOW_VARIABLE = "TTPU_PLUGINS"
DENY_VARIABLE = "TTPU_DISABLE_PLUGINS"
PACKS_VARIABLE = "TTPU_PATCH_PACKS"

State = Literal["available", "loaded", "disabled", "superseded", "conflict", "incompatible", "broken"]


@dataclass(frozen=True)
class PluginRecord:
    """One entry point: what it claims, which distribution brings it, and whether it can be used.

    An architecture of a collection has the group of all architectures, and `collection` set."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    state: State = "available"
    reason: str = ""
    collection: bool = False

    @property
    def usable(self) -> bool:
        """Whether asking for this name will try to import it."""
        return self.state in ("available", "loaded")

    @property
    def key(self) -> tuple[str, str, str]:
        """Group, name and distribution: what tells records apart."""
        return self.group, self.name, self.distribution


def installed_entry_points() -> list[metadata.EntryPoint]:
    """Entry points of our groups, each distribution once (an editable install may be found twice on sys.path)."""
    points = metadata.entry_points()
    return [point for group in (*GROUPS, COLLECTIONS) for point in points.select(group=group)]


def scan(entry_points: Iterable[metadata.EntryPoint]) -> Iterator[tuple[metadata.EntryPoint, PluginRecord]]:
    """Each entry point and its record. A collection's architecture yields to another distribution's own plugin for the
    same model type; other names that two distributions claim are conflicts."""
    admitted = [(point, _admitted(_record(point))) for point in entry_points]
    owners = {
        record.name: record.distribution
        for _, record in admitted
        if record.group == ARCHITECTURES and record.usable and not record.collection
    }
    found = [(point, _yielding(record, owners.get(record.name))) for point, record in admitted]
    reasons = _conflicts([record for _, record in found])
    for point, record in found:
        reason = reasons.get(record.key)
        yield point, record if reason is None else replace(record, state="conflict", reason=reason)


def _yielding(record: PluginRecord, owner: str | None) -> PluginRecord:
    """The record, superseded if it is a collection's and the distribution `owner` has a plugin of its own."""
    if not (record.collection and record.usable and owner):
        return record
    return replace(record, state="superseded", reason=f"{owner} has a plugin of its own for this model type.")


def _conflicts(records: Iterable[PluginRecord]) -> dict[tuple[str, str, str], str]:
    """Key of a usable record whose name is claimed twice → the sentence that says so."""
    claims: dict[tuple[str, str], dict[tuple[str, str, str], PluginRecord]] = defaultdict(dict)
    for record in records:
        if record.usable:
            claims[record.group, record.name][record.key] = record
    reasons: dict[tuple[str, str, str], str] = {}
    for (_, name), claimed in claims.items():
        if len(claimed) > 1:
            owners = [record.distribution for record in claimed.values()]
            reason = (
                f"{name!r} is claimed by {' and '.join(sorted(owners))}; choose one by excluding the other, for "
                f"example {DENY_VARIABLE}={owners[-1]}, or uninstall it."
            )
            reasons |= dict.fromkeys(claimed, reason)
    return reasons


def _admitted(record: PluginRecord) -> PluginRecord:
    """The record, disabled if a variable of the environment excludes it."""
    allowed, denied = names_in(os.environ.get(ALLOW_VARIABLE, "")), names_in(os.environ.get(DENY_VARIABLE, ""))
    if _matches(record, denied):
        return replace(record, state="disabled", reason=f"excluded by {DENY_VARIABLE}.")
    if allowed and not _matches(record, allowed):
        return replace(record, state="disabled", reason=f"not among those in {ALLOW_VARIABLE}.")
    return record


def _record(entry_point: metadata.EntryPoint) -> PluginRecord:
    distribution = entry_point.dist
    about: Any = distribution.metadata if distribution else {}
    name, version = about.get("Name") or "unknown", about.get("Version") or "unknown"
    collection = entry_point.group == COLLECTIONS
    group = ARCHITECTURES if collection else entry_point.group
    record = PluginRecord(group, entry_point.name, entry_point.value, _canonical(name), version, collection=collection)
    try:
        needed = _unmet_core_requirement(distribution)
    except ValueError as error:
        reason = f"its requirement on ttpu-core cannot be read ({sentence(str(error))[:-1]}); reinstall or update it."
        return replace(record, state="incompatible", reason=reason)
    if needed:
        core = metadata.version("ttpu-core")
        reason = f"it was built for {needed}, but ttpu-core {core} is installed; update one of them."
        return replace(record, state="incompatible", reason=reason)
    return record


def _unmet_core_requirement(distribution: metadata.Distribution | None) -> str:
    """The distribution's requirement on ttpu-core, where the installed core does not meet it.

    Raises:
        ValueError: the requirement is malformed.
    """
    for text in (distribution.requires if distribution else None) or ():
        if re.match(r"ttpu[-_.]+core(?![-_.\w])", text, re.IGNORECASE):
            from packaging.requirements import Requirement

            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and not requirement.specifier.contains(metadata.version("ttpu-core"), prereleases=True):
                return str(requirement)
    return ""


def _matches(record: PluginRecord, patterns: Iterable[str]) -> bool:
    """Whether a pattern names the record's distribution or its entry point."""
    return any(
        fnmatch.fnmatchcase(record.distribution, _canonical(pattern)) or fnmatch.fnmatchcase(record.name, pattern)
        for pattern in patterns
    )


def names_in(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sentence(text: str) -> str:
    """The text in one line that ends with a full stop."""
    flat = " ".join(text.split())
    return flat if flat.endswith(".") else f"{flat}."
