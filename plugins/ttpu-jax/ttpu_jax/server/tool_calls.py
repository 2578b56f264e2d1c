"""Tool calls within a model's text. In: text as it is generated; out: what is said, and calls with their names and
arguments, in the formats that models were trained on."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ttpu_core.errors import RequestError
from ttpu_jax.engine.sampling_params import GuidedDecoding
from ttpu_jax.server.chat_protocol import Tool

HERMES, LLAMA3, MISTRAL = "hermes", "llama3_json", "mistral"
FORMATS = (HERMES, LLAMA3, MISTRAL)
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


@dataclass(frozen=True)
class Said:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class Parser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> Said:
        """What is certain after this text."""
        ...

    def finish(self) -> Said:
        """What was held back, at the end."""
        ...


class Between:
    """Calls between two markers, anywhere in the text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as
    Hermes and Qwen write them. What is there and no call is content."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._held = ""
        self._called = False

    def push(self, text: str) -> Said:
        """Content up to what may be a marker, and calls that are complete."""
        self._held += text
        content, calls = "", []
        while True:
            start = self._held.find(self._opening)
            if start < 0:
                keep = _possible(self._held, self._opening)
                content += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(self._closing, start)
            content += self._held[:start]
            if end < 0:
                self._held = self._held[start:]
                break
            found = read_calls(self._held[start + len(self._opening) : end])
            end += len(self._closing)
            content += "" if found else self._held[start:end]
            calls += found
            self._held = self._held[end:]
        return self._said(content, calls)

    def finish(self) -> Said:
        """A call whose closing marker was cut off is still one where its JSON is whole."""
        held, self._held = self._held, ""
        found = read_calls(held[len(self._opening) :]) if held.startswith(self._opening) else []
        return self._said("" if found else held, found)

    def _said(self, content: str, calls: Sequence[Call]) -> Said:
        """Line breaks around calls are part of the format."""
        if (self._called or calls) and not content.strip():
            content = ""
        self._called = self._called or bool(calls)
        return Said(content, tuple(calls))


class Rest:
    """Calls from a marker to the end: Mistral's `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`; and where
    the whole answer may be one, Llama 3's `{"name": ..., "parameters": ...}`."""

    def __init__(self, markers: Sequence[str], read: Callable[[str], list[Call]], *, bare: bool = False) -> None:
        self._markers, self._read, self._bare = markers, read, bare
        self._held = ""
        self._started = False  # content was said, so that what comes is no bare call
        self._calling = False

    def push(self, text: str) -> Said:
        """Content up to what may be a marker; then nothing, until the end."""
        self._held += text
        if self._calling:
            return Said()
        found = [at for marker in self._markers if (at := self._held.find(marker)) >= 0]
        if found:
            content, self._held = self._held[: min(found)], self._held[min(found) :]
            self._calling = True
            return Said(content)
        if self._bare and not self._started and (not self._held.strip() or self._held.lstrip().startswith("{")):
            return Said()
        keep = max((_possible(self._held, marker) for marker in self._markers), default=0)
        content, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._started = self._started or bool(content)
        return Said(content)

    def finish(self) -> Said:
        """Calls, or what was held as content where it is none."""
        held, self._held = self._held, ""
        body = held
        for marker in self._markers:
            if body.startswith(marker):
                body = body[len(marker) :]
        calls = self._read(body) if self._calling or (self._bare and not self._started) else []
        return Said("" if calls else held, tuple(calls))


class Forced:
    """The whole answer is a JSON list of calls, as guided decoding made it for tool_choice=required."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._held = ""
        self._new_id = new_id

    def push(self, text: str) -> Said:
        """Nothing, until the end."""
        self._held += text
        return Said()

    def finish(self) -> Said:
        """The calls; what was cut off is content."""
        calls = read_calls(self._held)
        return Said("" if calls else self._held, tuple(Call(one.name, one.arguments, self._new_id()) for one in calls))


def read_calls(text: str) -> list[Call]:
    """Calls of a JSON object, a list of them, or several one after another; none where any of it is something else."""
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


def _mistral(text: str) -> list[Call]:
    """A JSON list, or `name[ARGS]{...}` for each call; ids of nine letters, which Mistral's templates demand."""
    calls = read_calls(text)
    if not calls:
        for part in text.split("[TOOL_CALLS]"):
            found = re.fullmatch(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL)
            if found is None or not _is_json(found[2]):
                return []
            calls.append(Call(found[1], found[2]))
    return [Call(call.name, call.arguments, short_id()) for call in calls]


def short_id() -> str:
    """Nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _possible(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


_PARSERS: Mapping[str, Callable[[], Parser]] = {
    HERMES: lambda: Between("<tool_call>", "</tool_call>"),
    LLAMA3: lambda: Rest(("<|python_tag|>",), read_calls, bare=True),
    MISTRAL: lambda: Rest(("[TOOL_CALLS]",), _mistral),
}
MARKERS: Mapping[str, str] = {HERMES: "<tool_call>", LLAMA3: "<|python_tag|>", MISTRAL: "[TOOL_CALLS]"}
"""The text that begins a call."""


def parser(name: str) -> Parser:
    """A fresh parser of a format."""
    return _PARSERS[name]()


def format_of(asked: str, template: str | None) -> str | None:
    """The format to read: the one asked for, or with `auto` what the chat template shows its model; None for none.

    Raises:
        RequestError: a format that does not exist.
    """
    if asked in FORMATS:
        return asked
    if asked != "auto":
        raise RequestError(
            f"the tool call parser {asked!r} was asked for, but there are auto, {', '.join(FORMATS)}: use one of those."
        )
    if template is None:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA3 if "<|python_tag|>" in template or '"parameters"' in template else None


def forced_calls(tools: Sequence[Tool], *, most: int | None) -> GuidedDecoding:
    """What an answer must be where some tool must be called: a list of 1 to `most` calls."""
    definitions: dict[str, Any] = {}
    one_of = []
    for number, tool in enumerate(tools):
        schema = _renamed(_schema(tool), f"{number}.")
        for key in _DEFINITIONS:
            definitions |= {f"{number}.{name}": value for name, value in schema.pop(key, {}).items()}
        one_of.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = one_of[0] if len(one_of) == 1 else {"anyOf": one_of}
    root: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if most is not None:
        root["maxItems"] = most
    if definitions:
        root["$defs"] = definitions
    return GuidedDecoding(json=root)


def forced_arguments(tool: Tool) -> GuidedDecoding:
    """What an answer must be where this tool must be called: its arguments."""
    return GuidedDecoding(json=_schema(tool))


_DEFINITIONS = ("$defs", "definitions")


def _schema(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.function.parameters or {})
    return {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}


def _renamed(schema: Any, prefix: str) -> Any:
    """A schema whose references name definitions with a prefix, for they move to the root of a larger schema."""
    if isinstance(schema, list):
        return [_renamed(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _renamed(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    for key in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{key}/"):
            moved["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
    return moved
