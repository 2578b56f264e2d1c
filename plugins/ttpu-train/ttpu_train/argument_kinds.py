"""Checks that values of arguments are of the kinds that their fields are annotated with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ttpu_core.errors import RequestError


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_path(value: Any) -> bool:
    return _is_text(value) or isinstance(value, os.PathLike)


def _each(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_one, value))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a mapping"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "str | Path": (_is_path, "a path"),
    "Sequence[str]": (_each(_is_text), "a list of texts"),
    "Sequence[float]": (_each(_is_number), "a list of numbers"),
    "str | Sequence[str]": (lambda value: _is_text(value) or _each(_is_text)(value), "a text or a list of texts"),
}
"""A field's annotation, without None → whether a value is of it, and its words."""


def check_kind(name: str, annotation: str, value: Any) -> None:
    """Refuse a value of another kind than a field has.

    Args:
        name: of the argument.
        annotation: of its field; one that is not known is not checked.
        value: that was given.

    Raises:
        RequestError: it is of another kind.
    """
    wanted = annotation.removesuffix(" | None")
    if wanted not in KINDS or (value is None and wanted != annotation):
        return
    is_right, words = KINDS[wanted]
    need(is_right(value), name, value, words)


def check_fields(made: Any) -> None:
    """Refuse a dataclass with a value of another kind than its field has, or with a number that is not finite.

    Raises:
        RequestError: there is one.
    """
    for one in fields(made):
        value = getattr(made, one.name)
        check_kind(one.name, str(one.type), value)
        need(not isinstance(value, float) or math.isfinite(value), one.name, value, "a finite number")


def need(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Refuse a value.

    Raises:
        RequestError: it does not hold.
    """
    if not holds:
        raise RequestError(f"{name}={value!r} was given, but it is {allowed}: correct it.")


def among(value: Any, name: str, allowed: Any) -> None:
    """Refuse a value that is not one of some texts.

    Raises:
        RequestError: it is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name}={value!r} was given, but it is one of {', '.join(allowed)}: pass one of these.")
