"""Finds the installed tool parsers and the one that fits a checkpoint."""

from __future__ import annotations

from ttpu_core.plugin_records import TOOL_PARSERS
from ttpu_serve.entry_points import check, loaded, surest
from ttpu_serve.tool_parsers.protocol import ToolParser

GROUP = TOOL_PARSERS


def check_parser(asked: str) -> None:
    """Refuse the name of a parser that is not installed or cannot be used, before a model is loaded.

    Raises:
        RequestError: no installed parser has this name, or the environment excludes it.
        PluginError: the parser cannot be imported, or two distributions claim the name.
    """
    check(GROUP, asked, "auto")


def parser_for(asked: str, template: str | None) -> ToolParser | None:
    """Return the named parser, or for `auto` the one that knows the chat template best; None if no parser fits.

    Raises:
        RequestError: no installed parser has this name, or the environment excludes it.
        PluginError: the parser cannot be imported, or two distributions claim the name.
    """
    check_parser(asked)
    if asked != "auto":
        parser: ToolParser = loaded(GROUP, asked)
        return parser
    best: ToolParser | None = surest(GROUP, template)
    return best
