"""Loads objects that installed distributions offer to the server by entry points."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata
from typing import Any

from ttpu_core.errors import PluginError

log = logging.getLogger("ttpu.server")


@cache
def _points(group: str) -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=group)}


def names(group: str) -> list[str]:
    """Return the sorted entry-point names of a group, without importing anything."""
    return sorted(_points(group))


@cache
def loaded(group: str, name: str) -> Any:
    """Import and return the object of an entry point.

    Raises:
        PluginError: the object cannot be imported.
    """
    point = _points(group)[name]
    try:
        return point.load()
    except Exception as error:  # a plugin may fail in any way
        raise PluginError(
            f"{name!r} of the group {group} was asked for, but importing {point.value!r} failed with "
            f"{type(error).__name__}: {error}. Reinstall or uninstall the distribution that brings it."
        ) from error


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
