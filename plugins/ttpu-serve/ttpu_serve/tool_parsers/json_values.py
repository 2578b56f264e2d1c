"""Reads JSON values from text that arrives in pieces, and passes them on as they come."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from ttpu_serve.tool_parsers.incoming import BLANK, Incoming, Reading

MAX_DEPTH = 128
"""Levels of lists and objects, more than which are no arguments."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = string.digits + "+-." + string.ascii_letters
_LONGEST_SCALAR = 400  # characters: of a double without an exponent


def json_value(text: Incoming, say: Callable[[str], None]) -> Reading[bool]:
    """Pass one JSON value on to `say` and return whether it was complete; text after it is left. Control characters in
    strings, which JSON does not have, are escaped."""
    closing: list[str] = []
    state = "value"  # or "first value", "key", "first key", "after"
    while True:
        next_one = yield from text.peek()
        if not next_one:
            return False
        if next_one in BLANK:
            say(text.run_of(BLANK))
            continue
        if state.endswith("key") and next_one == '"':
            if not (yield from json_string(text, say)):
                return False
            say((yield from text.skip()))
            if not (yield from text.starts(":")):
                return False
            say(":")
            state = "value"
            continue
        if state == "after" and next_one == ",":
            say(text.take(1))
            state = "key" if closing[-1] == "}" else "value"
            continue
        if closing and next_one == closing[-1] and state in ("after", "first key", "first value"):
            say(text.take(1))
            closing.pop()
        elif state.endswith("value") and next_one in "{[":
            if len(closing) == MAX_DEPTH:
                return False
            say(text.take(1))
            closing.append("}" if next_one == "{" else "]")
            state = "first key" if next_one == "{" else "first value"
            continue
        elif not state.endswith("value") or not (yield from _leaf(text, next_one, say)):
            return False
        if not closing:
            return True
        state = "after"


def json_string(text: Incoming, say: Callable[[str], None]) -> Reading[bool]:
    """Pass one JSON string on to `say`, quotes and escapes as they are, and return whether it was complete."""
    if not (yield from text.starts('"')):
        return False
    say('"')
    while next_one := (yield from text.peek()):
        if next_one == '"':
            say(text.take(1))
            return True
        if next_one == "\\":
            escape = yield from text.peek(2)
            escape = (yield from text.peek(6)) if escape == "\\u" else escape
            if not _ESCAPE.fullmatch(escape):
                return False
            say(text.take(len(escape)))
        elif next_one < " ":
            say(escaped(text.take(1)))
        else:
            say(text.match(_PLAIN))
    return False


def read_string(text: Incoming) -> Reading[str | None]:
    """Return the value of a JSON string; None if it is none."""
    parts: list[str] = []
    if not (yield from json_string(text, parts.append)):
        return None
    value: str = json.loads("".join(parts))
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no half of a surrogate pair


def escaped(text: str) -> str:
    """Return a text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _leaf(text: Incoming, next_one: str, say: Callable[[str], None]) -> Reading[bool]:
    if next_one == '"':
        return (yield from json_string(text, say))
    count = 1
    while len(scalar := (yield from text.peek(count))) == count and scalar[-1] in _SCALAR_CHARACTERS:
        if count > _LONGEST_SCALAR:
            return False
        count += 1
    scalar = scalar if len(scalar) < count else scalar[:-1]
    if not _SCALAR.fullmatch(scalar):
        return False
    say(text.take(len(scalar)))
    return True
