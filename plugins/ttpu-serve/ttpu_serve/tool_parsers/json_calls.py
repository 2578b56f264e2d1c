"""Reads calls that are JSON objects: `{"name": ..., "arguments": {...}}`, alone, in a list, or one after another."""

from __future__ import annotations

from collections.abc import Callable

from ttpu_serve.tool_parsers.incoming import BLANK, Incoming, Reading, ReadStream
from ttpu_serve.tool_parsers.json_values import json_value, read_string
from ttpu_serve.tool_parsers.protocol import Tools

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")


def json_calls(text: Incoming, closings: tuple[str, ...] = (), *, known: bool = False) -> Reading[bool]:
    """Read one or more calls, then one of the closing markers where it is there. What begins with `text.keep()` before
    this is content if there is no call; return whether there was one.

    Args:
        closings: markers that may follow the last call.
        known: only a tool that the request offers can be called.
    """
    yield from text.skip()
    listed = bool((yield from text.starts("[")))
    called = False
    while True:
        yield from text.skip(BLANK + ",;" if called else BLANK)
        if called and (yield from text.peek()) != "{":
            break
        complete = yield from json_call(text, known=known)
        text.settle(call=complete)
        if not complete:
            return called
        called = True
        text.keep()
    ends = not listed or bool((yield from text.starts("]")))
    yield from text.skip()
    if (closings and (yield from text.starts(*closings))) or (listed and ends):
        text.forget()
    else:
        text.settle(call=False)
    return True


def json_call(text: Incoming, *, known: bool = False) -> Reading[bool]:
    """Read one call and return whether it was complete. It begins when its name is known and its arguments come, or
    when the object ends."""
    return (yield from _Call(text, known=known).read())


class _Call:
    """One call while its object is read."""

    def __init__(self, text: Incoming, *, known: bool) -> None:
        self._text, self._known = text, known
        self._name: str | None = None
        self._held: list[str] | None = None  # arguments that came before the name
        self._begun = False
        self._nested = False  # the call is the value of "function"

    def read(self) -> Reading[bool]:
        if not (yield from self._object()) or self._name is None:
            return False
        if self._begun:
            return True
        if not self._begin():
            return False
        if self._held is None:
            self._text.argue("{}")
        return True

    def _object(self) -> Reading[bool]:
        text = self._text
        if not (yield from text.starts("{")):
            return False
        yield from text.skip()
        if (yield from text.starts("}")):
            return True
        while True:
            yield from text.skip()
            key = yield from read_string(text)
            yield from text.skip()
            if key is None or not (yield from text.starts(":")):
                return False
            yield from text.skip()
            if not (yield from self._value(key)):
                return False
            yield from text.skip()
            if (yield from text.starts("}")):
                return True
            if not (yield from text.starts(",")):
                return False

    def _value(self, key: str) -> Reading[bool]:
        text = self._text
        first = yield from text.peek()
        if key in _NAMES and self._name is None and first == '"':
            self._name = yield from read_string(text)
            return bool(self._name)
        if key == "function" and self._name is None and first == "{" and not self._nested:
            self._nested = True
            return (yield from self._object())
        if key not in _ARGUMENTS or self._begun or self._held is not None:
            return (yield from json_value(text, _ignore))
        say: Callable[[str], None]
        if self._name is None:
            self._held = []
            say = self._held.append
        else:
            if not self._begin():
                return False
            say = text.argue
        if first == '"':  # JSON within a string
            written = yield from read_string(text)
            say(written or "")
            return written is not None
        if first == "n":
            say("{}")
            return (yield from json_value(text, _ignore))
        return (yield from json_value(text, say))

    def _begin(self) -> bool:
        """Begin the call, unless its tool has to be known and is not."""
        if self._name is None or (self._known and self._text.tools and self._name not in self._text.tools):
            return False
        self._text.begin(self._name)
        self._begun = True
        self._text.argue("".join(self._held or ()))
        return True


def _ignore(text: str) -> None:
    """Take text that means nothing here."""


def forced_stream(tools: Tools, new_id: Callable[[], str]) -> ReadStream:
    """Return the parser of a text that is a JSON list of calls, as guided decoding produces it for
    tool_choice=required."""
    text = Incoming(tools, new_id)

    def read() -> Reading[None]:
        text.keep()
        yield from json_calls(text)

    return ReadStream(text, read())
