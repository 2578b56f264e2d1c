"""Finds the installed tool parsers and the one that fits a checkpoint."""

from __future__ import annotations

from ttpu_core.errors import RequestError
from ttpu_serve.entry_points import loaded, names, surest
from ttpu_serve.tool_parsers.protocol import ToolParser

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
    best: ToolParser | None = surest(GROUP, template)
    return best
