"""The kinds of values that a config's readers ask for. A converter returns the value as that kind, or raises
ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def integer(value: Any) -> int:
    """An int, which a bool is not."""
    return value if isinstance(value, int) and not isinstance(value, bool) else _no()


def positive_integer(value: Any) -> int:
    """An int above zero."""
    return value if integer(value) > 0 else _no()


def finite_number(value: Any) -> float:
    """A finite number, as a float."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else _no()


def positive_number(value: Any) -> float:
    """A finite number above zero, as a float."""
    return finite_number(value) if finite_number(value) > 0 else _no()


def integers(value: Any) -> tuple[int, ...]:
    """A tuple of ints."""
    return tuple(map(integer, instance_of(tuple)(value)))


def numbers(value: Any) -> tuple[float, ...]:
    """A tuple of finite numbers, as floats."""
    return tuple(map(finite_number, instance_of(tuple)(value)))


def instance_of(kind: type[T]) -> Callable[[Any], T]:
    """A converter that takes instances of a class."""
    return lambda value: value if isinstance(value, kind) else _no()


def _no() -> Any:
    raise ValueError


KINDS: Mapping[type | None, tuple[str, Callable[[Any], Any]]] = {
    None: ("a value", lambda value: value),
    int: ("an integer", integer),
    float: ("a finite number", finite_number),
    bool: ("true or false", instance_of(bool)),
    str: ("a string", instance_of(str)),
    tuple: ("a list", instance_of(tuple)),
}
"""Kind → its name in an error, and the converter."""
