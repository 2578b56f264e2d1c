"""Finds the installed reasoning parsers and the one that fits a checkpoint."""

from __future__ import annotations

from ttpu_core.plugin_records import REASONING_PARSERS
from ttpu_serve.entry_points import check, loaded, surest
from ttpu_serve.reasoning_parsers.protocol import ReasoningParser

GROUP = REASONING_PARSERS


def check_parser(asked: str) -> None:
    """Refuse the name of a parser that is not installed or cannot be used.

    Raises:
        RequestError: no installed parser has this name, or the environment excludes it.
        PluginError: the parser cannot be imported, or two distributions claim the name.
    """
    check(GROUP, asked, "auto", "none")


def parser_for(asked: str, template: str | None) -> ReasoningParser | None:
    """Return the named parser; for `auto` the one whose markers the chat template has, or None if no parser fits; for
    `none` None.

    Raises:
        RequestError: no installed parser has this name, or the environment excludes it.
        PluginError: the parser cannot be imported, or two distributions claim the name.
    """
    check_parser(asked)
    if asked == "none":
        return None
    parser: ReasoningParser | None = loaded(GROUP, asked) if asked != "auto" else surest(GROUP, template)
    return parser
