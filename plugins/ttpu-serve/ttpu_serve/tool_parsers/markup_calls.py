"""Reads calls whose arguments stand between tags: `<function=weather><parameter=city>Oslo</parameter></function>`, as
Qwen3-Coder and MiniMax write them, and `weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>`, as GLM-4.5 does.
The text of an argument becomes a JSON value of the type that the tool's schema gives it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ttpu_serve.tool_parsers.incoming import Incoming, Reading
from ttpu_serve.tool_parsers.json_values import escaped
from ttpu_serve.tool_parsers.python_calls import literal

_VALUE_ENDS = ("</arg_value>",)


@dataclass(frozen=True)
class Tags:
    """The tags of a call: what stands before and after its name, before and after the name of an argument, and at its
    end. Arguments end with `</parameter>`."""

    function: str = "<function="
    parameter: str = "<parameter="
    after: str = ">"
    end: str = "</function>"

    @property
    def value_ends(self) -> tuple[str, ...]:
        """What a value ends with; its own closing tag may be missing."""
        return "\n</parameter>", "</parameter>", f"\n{self.parameter}", f"\n{self.end}"


INVOKE = Tags('<invoke name="', '<parameter name="', '">', "</invoke>")
"""As MiniMax M2 writes them."""


def function_parameters(opening: str, closing: str, tags: Tags = Tags()) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of `opening`, calls such as `<function=NAME><parameter=KEY>VALUE</parameter></function>`, and
    `closing`. The opening and the closing markers may be missing."""

    def read(text: Incoming) -> Reading[None]:
        while (yield from text.until((opening, tags.function), text.say)):
            text.keep()
            yield from text.starts(opening)
            yield from text.skip()
            complete = yield from _function(text, closing, tags)
            text.settle(call=complete)
            if complete:
                yield from _close(text, closing)

    return read


def argument_pairs(opening: str, closing: str) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of `opening`, the name, `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each argument,
    and `closing`."""

    def read(text: Incoming) -> Reading[None]:
        while (yield from text.until((opening,), text.say)):
            text.keep()
            text.take(len(opening))
            text.settle(call=(yield from _pairs(text, closing)))

    return read


def _close(text: Incoming, closing: str) -> Reading[None]:
    text.keep()
    yield from text.skip()
    if (yield from text.starts(closing)):
        text.forget()
    else:
        text.settle(call=False)


def _function(text: Incoming, closing: str, tags: Tags) -> Reading[bool]:
    name = ""
    if (yield from text.starts(tags.function)):
        name = (yield from _before(text, tags.after)).strip("\"' \n")
    if not name:
        return False
    arguments = _Argument(text, name)
    while True:
        yield from text.skip()
        if (yield from text.starts(tags.end)) or (yield from text.peek(len(closing))) == closing:
            arguments.end()
            return True
        if not (yield from text.starts(tags.parameter)):
            return False
        key = (yield from _before(text, tags.after)).strip("\"' \n")
        if not key:
            return False
        yield from text.starts("\n")
        ending = yield from arguments.read(key, tags.value_ends)
        if not ending:
            return False
        if ending.endswith("</parameter>"):
            text.take(len(ending))


def _pairs(text: Incoming, closing: str) -> Reading[bool]:
    named: list[str] = []
    if not (yield from text.until(("<arg_key>", closing, "<tool_call>"), named.append)):
        return False
    name = "".join(named).strip()
    if not name or any(blank in name for blank in " \n{"):
        return False
    arguments = _Argument(text, name)
    while True:
        yield from text.skip()
        if (yield from text.starts(closing)):
            arguments.end()
            return True
        if not (yield from text.starts("<arg_key>")):
            return False
        key = (yield from _before(text, "</arg_key>")).strip()
        yield from text.skip()
        if not key or not (yield from text.starts("<arg_value>")):
            return False
        ending = yield from arguments.read(key, _VALUE_ENDS)
        if not ending:
            return False
        text.take(len(ending))


def _before(text: Incoming, ending: str) -> Reading[str]:
    """Return the text before `ending`, which is consumed; "" where it does not come."""
    parts: list[str] = []
    if not (yield from text.until((ending, "\n\n"), parts.append)) or not (yield from text.starts(ending)):
        return ""
    return "".join(parts)


class _Argument:
    """The arguments of one call, which begins here."""

    def __init__(self, text: Incoming, name: str) -> None:
        self._text, self._first = text, True
        properties = text.tools.get(name, {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        text.begin(name)
        text.argue("{")

    def read(self, key: str, endings: tuple[str, ...]) -> Reading[str]:
        """Read the value of an argument up to one of the endings, which is returned and not consumed."""
        text, types = self._text, _types(self._properties.get(key))
        text.argue(f"{'' if self._first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._first = False
        if types == {"string"}:
            text.argue('"')
            ending = yield from text.until(endings, lambda piece: text.argue(escaped(piece)))
            if ending:
                text.argue('"')
            return ending
        parts: list[str] = []
        ending = yield from text.until(endings, parts.append)
        if ending:
            text.argue(_as_json("".join(parts), types))
        return ending

    def end(self) -> None:
        """End the arguments."""
        self._text.argue("}")


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows at its top; a schema that does not say allows strings."""
    if not isinstance(schema, Mapping):
        return {"string"}
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)} or {"string"}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(name), list):
            return {one for option in options for one in _types(option)} or {"string"}
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return {_type_of(value) for value in values}
    return {"any"} if "$ref" in schema else {"string"}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number" if isinstance(value, float) else "integer"
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "null"


def _as_json(written: str, types: set[str]) -> str:
    """Return a value as JSON of one of the types; as a string where it is none of them."""
    text = written.strip()
    value = _json_or_python(text)
    if value is not None:
        kind = _type_of(json.loads(value))
        allowed = {kind} | ({"number"} if kind == "integer" else set())
        if "any" in types or allowed & types:
            return value
        if kind == "number" and "integer" in types and float(text).is_integer():
            return str(int(float(text)))
    return json.dumps(written, ensure_ascii=False)


def _json_or_python(text: str) -> str | None:
    """Return the JSON text of a value that is written as JSON or as a Python literal; None if it is neither."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    source = Incoming({}, str)
    parts: list[str] = []
    source.add(text)
    source.ended = True
    reading = literal(source, parts.append, 0)
    try:
        next(reading)
    except StopIteration as done:
        return "".join(parts) if done.value and not source.come() else None
    return None


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which JSON does not have."""
    raise ValueError(constant)
