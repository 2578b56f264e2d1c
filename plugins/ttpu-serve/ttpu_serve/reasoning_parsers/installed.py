"""The reasoning parsers that are installed."""

from __future__ import annotations

from ttpu_core.errors import RequestError
from ttpu_serve.entry_points import loaded, names
from ttpu_serve.reasoning_parsers.protocol import ReasoningParser

GROUP = "ttpu.reasoning_parsers"


def check_parser(asked: str | None) -> None:
    """Refuse a name that no installed parser has.

    Raises:
        RequestError: there is no such parser.
    """
    if asked is not None and asked not in names(GROUP):
        raise RequestError(
            f"the reasoning parser {asked!r} was asked for, but there are {', '.join(names(GROUP)) or 'none'}: use one "
            "of those, or leave it out."
        )


def parser_for(asked: str | None) -> ReasoningParser | None:
    """The parser asked for; None where none was.

    Raises:
        RequestError: there is no such parser.
    """
    check_parser(asked)
    parser: ReasoningParser | None = None if asked is None else loaded(GROUP, asked)
    return parser
