"""Objects that installed distributions offer the server under names of their own."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from ttpu_core.errors import PluginError


@cache
def _points(group: str) -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=group)}


def names(group: str) -> list[str]:
    """The names of a group, sorted. Imports nothing."""
    return sorted(_points(group))


@cache
def loaded(group: str, name: str) -> Any:
    """What an entry point names.

    Raises:
        PluginError: it cannot be imported.
    """
    point = _points(group)[name]
    try:
        return point.load()
    except Exception as error:  # a plugin may fail in any way
        raise PluginError(
            f"{name!r} of the group {group} was asked for, but importing {point.value!r} failed with "
            f"{type(error).__name__}: {error}. Reinstall or uninstall the distribution that brings it."
        ) from error
