"""Finds the installed reasoning parsers and the one that fits a checkpoint."""

from __future__ import annotations

from ttpu_core.errors import RequestError
from ttpu_serve.entry_points import loaded, names, surest
from ttpu_serve.reasoning_parsers.protocol import ReasoningParser

GROUP = "ttpu.reasoning_parsers"


def check_parser(asked: str) -> None:
    """Refuse the name of a parser that is not installed.

    Raises:
        RequestError: no installed parser has this name.
    """
    if asked not in ("auto", "none", *names(GROUP)):
        raise RequestError(
            f"the reasoning parser {asked!r} was asked for, but there are auto, none, {', '.join(names(GROUP))}: use "
            "one of those."
        )


def parser_for(asked: str, template: str | None) -> ReasoningParser | None:
    """Return the named parser; for `auto` the one whose markers the chat template has, or None if no parser fits; for
    `none` None.

    Raises:
        RequestError: no installed parser has this name.
    """
    check_parser(asked)
    if asked == "none":
        return None
    parser: ReasoningParser | None = loaded(GROUP, asked) if asked != "auto" else surest(GROUP, template)
    return parser
