"""Loads objects that installed distributions offer to the server by entry points."""

from __future__ import annotations

import logging
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.plugin_records import REASONING_PARSERS, TOOL_PARSERS
from ttpu_core.registry import default_registry

log = logging.getLogger("ttpu.server")

KINDS = {TOOL_PARSERS: "the tool call parser", REASONING_PARSERS: "the reasoning parser"}
"""What an entry point of a group is, in errors."""


def names(group: str) -> list[str]:
    """Return the sorted entry-point names of a group that the environment does not exclude, without importing
    anything."""
    return list(default_registry().names(group))


def check(group: str, name: str, *words: str) -> None:
    """Refuse a name that is none of `words`, which name no entry point, and for which no usable entry point of the
    group exists. Import the entry point of a name that is not among `words`.

    Raises:
        RequestError: no entry point has this name, or the environment excludes it.
        PluginError: the object cannot be imported, or two distributions claim the name.
    """
    if name in words:
        return
    allowed = ", ".join((*words, *names(group)))
    excluded = [record for record in default_registry().plugins(group) if record.name == name]
    if not excluded:
        raise RequestError(f"{KINDS[group]} {name!r} was asked for, but there are {allowed}: use one of those.")
    if name not in names(group):
        raise RequestError(
            f"{KINDS[group]} {name!r} was asked for, but that of {excluded[0].distribution} is {excluded[0].state}: "
            f"{excluded[0].reason} Change that variable, or use one of {allowed}."
        )
    loaded(group, name)


def loaded(group: str, name: str) -> Any:
    """Import and return the object of an entry point.

    Raises:
        PluginError: the object cannot be imported, or two distributions claim the name.
    """
    return default_registry().load(group, name, KINDS[group])


def surest(group: str, template: str | None) -> Any:
    """Return the object whose `knows(template)` is the highest, and more than 0; among equals, the last by name. None
    if there is none, or no template."""
    highest, best = 0, None
    for name in names(group) if template is not None else ():
        try:
            candidate = loaded(group, name)
            sure = candidate.knows(template)
        except Exception as error:  # a broken one must not take the others along
            log.warning("the parser %r of %s is left out: %s", name, group, error)
            continue
        if sure >= max(highest, 1):
            highest, best = sure, candidate
    return best
