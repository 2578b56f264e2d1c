"""Lines of Python that are no longer than this repository's."""

from __future__ import annotations

import json
from typing import Any

LINE = 120


def short(line: str) -> str:
    """A line, or if it is too long its outermost call with a line for each argument."""
    if len(line) <= LINE:
        return line
    if line.startswith("from "):
        start, _, names = line.partition(" import ")
        return "\n".join([f"{start} import (", *(f"    {name}," for name in names.split(", ")), ")"])
    if not line.endswith(")"):
        return line
    opened = line.index("(")
    indent = " " * (len(line) - len(line.lstrip()))
    parts = [f"{indent}    {part}," for part in _arguments(line[opened + 1 : -1])]
    return "\n".join([line[: opened + 1], *(each for part in parts for each in _short_part(part)), f"{indent})"])


def _short_part(line: str) -> list[str]:
    """An argument's line, broken again where it is a call that is too long."""
    if len(line) <= LINE or not line.endswith("),"):
        return [line]
    return f"{short(line[:-1])},".split("\n")


def _arguments(text: str) -> list[str]:
    """The arguments of a call, cut at the commas outside brackets and quotes."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def literal(value: Any) -> str:
    """A value as it is written in Python, with underscores in large numbers."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return json.dumps(value) if isinstance(value, str) else repr(value)
