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

from ttpu_core.distributions import official

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
PARSERS = (TOOL_PARSERS, REASONING_PARSERS)  # many have the name of a family, whose exclusion must not exclude them

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
    same model type, and a parser of TTPU yields to another distribution's of the same name; other names that two
    distributions claim are conflicts."""
    admitted = [(point, _admitted(_record(point))) for point in entry_points]
    owners = {
        (record.group, record.name): record.distribution
        for _, record in admitted
        if record.usable and not _may_yield(record)
    }
    found = [(point, _yielding(record, owners.get((record.group, record.name)))) for point, record in admitted]
    reasons = _conflicts([record for _, record in found])
    for point, record in found:
        reason = reasons.get(record.key)
        yield point, record if reason is None else replace(record, state="conflict", reason=reason)


def _yielding(record: PluginRecord, owner: str | None) -> PluginRecord:
    """The record, superseded if it may yield and the distribution `owner` has a plugin that does not."""
    if not (_may_yield(record) and record.usable and owner):
        return record
    taken = "a plugin of its own for this model type" if record.collection else "a parser of this name"
    return replace(record, state="superseded", reason=f"{owner} has {taken}.")


def _may_yield(record: PluginRecord) -> bool:
    """Whether another distribution's plugin of the same group and name takes precedence."""
    return record.collection or (record.group in PARSERS and record.distribution in official())


def _conflicts(records: Iterable[PluginRecord]) -> dict[tuple[str, str, str], str]:
    """Key of a usable record whose name is claimed twice → the sentence that says so."""
    claims: dict[tuple[str, str], dict[tuple[str, str, str], PluginRecord]] = defaultdict(dict)
    for record in records:
        if record.usable:
            claims[record.group, record.name][record.key] = record
    reasons: dict[tuple[str, str, str], str] = {}
    for (_, name), claimed in claims.items():
        if len(claimed) > 1:
            owners = sorted(record.distribution for record in claimed.values())
            excluded = ([owner for owner in owners if owner not in official()] or owners)[-1]
            reason = (
                f"{name!r} is claimed by {' and '.join(owners)}; choose one by excluding the other, for "
                f"example {DENY_VARIABLE}={excluded}, or uninstall it."
            )
            reasons |= dict.fromkeys(claimed, reason)
    return reasons


def _admitted(record: PluginRecord) -> PluginRecord:
    """The record, disabled if a variable of the environment excludes it. A list of what is allowed leaves parsers in,
    as they serve every family."""
    allowed, denied = names_in(os.environ.get(ALLOW_VARIABLE, "")), names_in(os.environ.get(DENY_VARIABLE, ""))
    if _matches(record, denied):
        return replace(record, state="disabled", reason=f"excluded by {DENY_VARIABLE}.")
    if allowed and record.group not in PARSERS and not _matches(record, allowed):
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
    return any(_names(pattern, record) for pattern in patterns)


def _names(pattern: str, record: PluginRecord) -> bool:
    """Whether the pattern is the distribution, `group:name`, or the name; a parser's name alone does not count."""
    group, colon, name = pattern.rpartition(":")
    if colon:
        return fnmatch.fnmatchcase(record.group, group) and fnmatch.fnmatchcase(record.name, name)
    named = record.group not in PARSERS and fnmatch.fnmatchcase(record.name, pattern)
    return named or fnmatch.fnmatchcase(record.distribution, _canonical(pattern))


def names_in(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sentence(text: str) -> str:
    """The text in one line that ends with a full stop."""
    flat = " ".join(text.split())
    return flat if flat.endswith(".") else f"{flat}."
