"""Reads calls written in Python: `[weather(city="Oslo", days=[1, 2]), clock()]`, as Llama 3.2 and 4 write them. The
arguments, which are literals, become JSON while they come."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from ttpu_serve.tool_parsers.incoming import Incoming, Reading
from ttpu_serve.tool_parsers.json_values import escaped

MAX_DEPTH = 32
"""Levels of lists and dicts, more than which are no arguments."""
_NAME = string.ascii_letters + string.digits + "_.-"
_KEY = string.ascii_letters + string.digits + "_"
_PLAIN = re.compile(r"""[^"'\\]+""")
_LONGEST_WORD = 400  # characters: of a double without an exponent
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


def python_calls(opening: str, closing: str) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of a list of calls behind an opening marker anywhere, or at the beginning of the text without
    one, if it calls a tool that the request offers."""

    def read(text: Incoming) -> Reading[None]:
        text.keep()
        yield from text.skip()
        marked = bool((yield from text.starts(opening)))
        yield from _calls(text, closing, known=not marked)
        while (yield from text.until((opening,), text.say)):
            text.keep()
            text.take(len(opening))
            yield from _calls(text, closing, known=False)

    return read


def _calls(text: Incoming, closing: str, *, known: bool) -> Reading[None]:
    yield from text.skip()
    if not (yield from text.starts("[")):
        text.settle(call=False)
        return
    called = ended = False
    while True:
        yield from text.skip()
        if called and (yield from text.starts("]")):  # after a comma
            ended = True
            break
        complete = yield from _call(text, known=known)
        text.settle(call=complete)
        if not complete:
            return
        called = True
        text.keep()
        yield from text.skip()
        if not (yield from text.starts(",")):
            ended = bool((yield from text.starts("]")))
            break
    yield from text.skip()
    if (yield from text.starts(closing)) or ended:
        text.forget()
    else:
        text.settle(call=False)


def _call(text: Incoming, *, known: bool) -> Reading[bool]:
    name = yield from text.skip(_NAME)
    yield from text.skip()
    if not name or not (yield from text.starts("(")) or (known and text.tools and name not in text.tools):
        return False
    text.begin(name)
    text.argue("{")
    first = True
    while True:
        yield from text.skip()
        if (yield from text.starts(")")):
            text.argue("}")
            return True
        key = yield from text.skip(_KEY)
        yield from text.skip()
        if not key or not (yield from text.starts("=")):
            return False
        text.argue(f'{"" if first else ", "}"{key}": ')
        first = False
        if not (yield from literal(text, text.argue, 0)):
            return False
        yield from text.skip()
        if not (yield from text.starts(",")) and (yield from text.peek()) != ")":
            return False


def literal(text: Incoming, say: Callable[[str], None], depth: int) -> Reading[bool]:
    """Pass a Python literal on to `say` as JSON, and return whether it was complete and JSON has such a value."""
    yield from text.skip()
    first = yield from text.peek()
    if not first or depth == MAX_DEPTH:
        return False
    if first in "\"'":
        return (yield from _string(text, say))
    if first in "[(":
        text.take(1)
        return (yield from _items(text, say, "]" if first == "[" else ")", depth))
    if first == "{":
        text.take(1)
        return (yield from _pairs(text, say, depth))
    return (yield from _word(text, say))


def _items(text: Incoming, say: Callable[[str], None], closing: str, depth: int) -> Reading[bool]:
    say("[")
    first = True
    while True:
        yield from text.skip()
        if (yield from text.starts(closing)):
            say("]")
            return True
        if not first:
            say(", ")
        first = False
        if not (yield from literal(text, say, depth + 1)):
            return False
        yield from text.skip()
        if not (yield from text.starts(",")) and (yield from text.peek()) != closing:
            return False


def _pairs(text: Incoming, say: Callable[[str], None], depth: int) -> Reading[bool]:
    say("{")
    first = True
    while True:
        yield from text.skip()
        if (yield from text.starts("}")):
            say("}")
            return True
        if not first:
            say(", ")
        first = False
        if not (yield from _string(text, say)):
            return False
        yield from text.skip()
        if not (yield from text.starts(":")):
            return False
        say(": ")
        if not (yield from literal(text, say, depth + 1)):
            return False
        yield from text.skip()
        if not (yield from text.starts(",")) and (yield from text.peek()) != "}":
            return False


def _string(text: Incoming, say: Callable[[str], None]) -> Reading[bool]:
    quote = yield from text.starts('"""', "'''", '"', "'")
    if not quote:
        return False
    say('"')
    while next_one := (yield from text.peek()):
        if next_one == "\\":
            escape = yield from text.peek(2)
            count = _CODES.get(escape[1:], 0)
            code = (yield from text.peek(2 + count))[2:]
            if len(escape) < 2 or len(code) < count:
                return False
            character = _ESCAPES.get(escape[1:], escape)
            if count:
                try:
                    character = chr(int(code, 16))
                except (ValueError, OverflowError):
                    return False
            text.take(2 + count)
            say(json.dumps(character)[1:-1] if "\ud800" <= character <= "\udfff" else escaped(character))
        elif next_one == quote[0] and (yield from text.starts(quote)):
            say('"')
            return True
        else:
            say(escaped(text.match(_PLAIN) or text.take(1)))
    return False


def _word(text: Incoming, say: Callable[[str], None]) -> Reading[bool]:
    count = 1
    while len(word := (yield from text.peek(count))) == count and (word[-1].isalnum() or word[-1] in "+-._"):
        if count > _LONGEST_WORD:
            return False
        count += 1
    word = word if len(word) < count else word[:-1]
    written = _WORDS.get(word) or _number(word)
    if not written:
        return False
    text.take(len(word))
    say(written)
    return True


def _number(word: str) -> str:
    try:
        return str(int(word, 0)) if not any(sign in word for sign in ".eE") or word[:2] == "0x" else _finite(word)
    except ValueError:
        return ""


def _finite(word: str) -> str:
    try:
        return json.dumps(float(word), allow_nan=False)
    except (OverflowError, ValueError):
        return ""
