"""Finds the installed tool parsers and the one that fits a checkpoint."""

from __future__ import annotations

import logging

from ttpu_core.errors import PluginError, RequestError
from ttpu_serve.entry_points import loaded, names
from ttpu_serve.tool_parsers.protocol import ToolParser

log = logging.getLogger("ttpu.server")

GROUP = "ttpu.tool_parsers"


def check_parser(asked: str) -> None:
    """Refuse the name of a parser that is not installed, before a model is loaded.

    Raises:
        RequestError: no installed parser has this name.
    """
    if asked != "auto" and asked not in names(GROUP):
        raise RequestError(
            f"the tool call parser {asked!r} was asked for, but there are auto, {', '.join(names(GROUP))}: use one of "
            "those."
        )


def parser_for(asked: str, template: str | None) -> ToolParser | None:
    """Return the named parser, or for `auto` the one that knows the chat template best; None if no parser fits.

    Raises:
        RequestError: no installed parser has this name.
    """
    check_parser(asked)
    if asked != "auto":
        parser: ToolParser = loaded(GROUP, asked)
        return parser
    if template is None:
        return None
    surest, best = 0, None
    for name in names(GROUP):
        try:
            candidate: ToolParser = loaded(GROUP, name)
        except PluginError as error:  # a broken one must not take the others along
            log.warning("a tool parser is left out: %s", error)
            continue
        if (sure := candidate.knows(template)) >= max(surest, 1):
            surest, best = sure, candidate
    return best
