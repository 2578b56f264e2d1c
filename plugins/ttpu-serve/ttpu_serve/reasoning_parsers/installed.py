"""Finds the installed reasoning parsers."""

from __future__ import annotations

from ttpu_core.errors import RequestError
from ttpu_serve.entry_points import loaded, names
from ttpu_serve.reasoning_parsers.protocol import ReasoningParser

GROUP = "ttpu.reasoning_parsers"


def check_parser(asked: str | None) -> None:
    """Refuse the name of a parser that is not installed.

    Raises:
        RequestError: no installed parser has this name.
    """
    if asked is not None and asked not in names(GROUP):
        raise RequestError(
            f"the reasoning parser {asked!r} was asked for, but there are {', '.join(names(GROUP)) or 'none'}: use one "
            "of those, or leave it out."
        )


def parser_for(asked: str | None) -> ReasoningParser | None:
    """Return the named parser, or None if no name is given.

    Raises:
        RequestError: no installed parser has this name.
    """
    check_parser(asked)
    parser: ReasoningParser | None = None if asked is None else loaded(GROUP, asked)
    return parser
