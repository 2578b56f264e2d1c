"""Parts that tool parsers share: JSON calls, and markers in text that arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttpu_serve.tool_parsers.protocol import Call, Parsed


class Until:
    """Text up to the first of some markers, stored in parts so that no text is searched twice."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._kept = max((len(marker) for marker in markers), default=1) - 1  # may begin a marker
        self._parts: list[str] = []
        self.last = ""  # what of it is searched with the next piece, and that piece

    def push(self, text: str) -> int | None:
        """Add text; return where in `last` a marker begins, if one does."""
        cut = max(0, len(self.last) - self._kept)
        self._parts.append(self.last[:cut])
        self.last = self.last[cut:] + text
        return min((at for marker in self._markers if (at := self.last.find(marker)) >= 0), default=None)

    def split(self, at: int) -> tuple[str, str]:
        """Return the text before a position in `last` and the text from there."""
        return "".join(self._parts) + self.last[:at], self.last[at:]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self._parts) + self.last


class Forced:
    """Parses a text that is a JSON list of calls, as guided decoding produces it for tool_choice=required."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._held: list[str] = []
        self._new_id = new_id

    def push(self, text: str) -> Parsed:
        """Collect the text; return nothing before the end."""
        self._held.append(text)
        return Parsed()

    def finish(self) -> Parsed:
        """Return the calls; an incomplete text is returned as content."""
        held = "".join(self._held)
        calls = read_calls(held)
        return Parsed("" if calls else held, tuple(Call(one.name, one.arguments, self._new_id()) for one in calls))


def read_calls(text: str) -> list[Call]:
    """Parse the calls of a JSON object, a list of objects, or several in sequence; return none if any part is something
    else."""
    decoder = json.JSONDecoder()
    found: list[Call] = []
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            call = _call_of(one)
            if call is None:
                return []
            found.append(call)
    return found


def _call_of(value: Any) -> Call | None:
    if not isinstance(value, Mapping):
        return None
    value = value.get("function", value) if isinstance(value.get("function"), Mapping) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def possible_marker(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
