"""Reads JSON objects of which other APIs make their messages, such as blocks and items: texts, arguments of calls, and
fields that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.generation.ranges import short
from ttpu_serve.server.chat_protocol import parsable
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.given_fields import given_fields


def text_field(item: Mapping[str, Any], name: str, place: str) -> str:
    """Return a text that an object must have. `place`: the path of the object in the request's body.

    Raises:
        ApiError: the object has no such text.
    """
    if not isinstance(value := item.get(name), str):
        raise ApiError(f"{place}.{name} is {short(value)}, but a text is needed: pass it.", param=f"{place}.{name}")
    return value


def call_arguments(text: str, param: str, found: str = "") -> str:
    """Return the arguments of a call, which are JSON text.

    Args:
        text: the arguments.
        param: the field that an error names.
        found: what precedes the arguments in the sentence of an error; "" says that the field is these arguments.

    Raises:
        ApiError: they are too many or too deep.
    """
    try:
        return parsable(text)
    except ValueError as error:
        raise ApiError(f"{found or f'{param} is'} {short(text)}: {error}.", param=param) from error


def check_fields(item: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    """Check that an object has no fields that must be refused.

    Args:
        item: the object.
        known: the names of the fields that it may have.
        place: the path of the object in the request's body.

    Raises:
        ApiError: it has another field, which is refused.
    """
    for name in sorted(map(str, set(item) - set(known))):
        if reason := given_fields().refusal_of(name, place, known):
            raise ApiError(f"the field {name[:80]!r} of {place} was given, but {reason}.", param=place)
