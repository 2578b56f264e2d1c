"""Loads objects that installed distributions offer to the server by entry points."""

from __future__ import annotations

import logging
from typing import Any

from ttpu_core.registry import default_registry

log = logging.getLogger("ttpu.server")


def names(group: str) -> list[str]:
    """Return the sorted entry-point names of a group that the environment does not exclude, without importing
    anything."""
    return list(default_registry().names(group))


def loaded(group: str, name: str) -> Any:
    """Import and return the object of an entry point.

    Raises:
        PluginError: the object cannot be imported, or two distributions claim the name.
    """
    return default_registry().load(group, name, f"in the group {group}")


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
