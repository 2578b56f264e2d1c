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

HERMES, LLAMA3, MISTRAL = "hermes", "llama3_json", "mistral"
FORMATS = (HERMES, LLAMA3, MISTRAL)
_NAMED = re.compile(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
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


class Until:
    """Text up to the first of some markers, held in parts so that what was searched once is not searched again."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._kept = max((len(marker) for marker in markers), default=1) - 1  # may begin a marker
        self._parts: list[str] = []
        self.last = ""  # what of it is searched with the next piece, and that piece

    def push(self, text: str) -> int | None:
        """Where in `last` a marker begins, if one does."""
        cut = max(0, len(self.last) - self._kept)
        self._parts.append(self.last[:cut])
        self.last = self.last[cut:] + text
        return min((at for marker in self._markers if (at := self.last.find(marker)) >= 0), default=None)

    def split(self, at: int) -> tuple[str, str]:
        """All before a place in `last`, and what is there and after it."""
        return "".join(self._parts) + self.last[:at], self.last[at:]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._parts) + self.last


class Between:
    """Calls between two markers, anywhere in the text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as
    Hermes and Qwen write them. What is there and no call is content."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._held = ""  # what may begin the opening marker
        self._call_text: Until | None = None  # after one
        self._blank = ""  # space at the end of what was said, once a call was made
        self._called = False

    def push(self, text: str) -> Said:
        """Content up to what may be a marker, and calls that are complete."""
        content = ""
        calls: list[Call] = []
        while True:
            if self._call_text is None:
                text, self._held = self._held + text, ""
                start = text.find(self._opening)
                if start < 0:
                    start = len(text) - _possible(text, self._opening)
                    self._held = text[start:]
                    return Said(content + self._say(text[:start]), tuple(calls))
                content += self._say(text[:start])
                text = text[start + len(self._opening) :]
                self._call_text = Until((self._closing,))
            at = self._call_text.push(text)
            if at is None:
                return Said(content, tuple(calls))
            body, text = self._call_text.split(at)
            self._call_text = None
            text = text[len(self._closing) :]
            found = read_calls(body)
            content += self._call(found, self._opening + body + self._closing)
            calls += found

    def finish(self) -> Said:
        """A call whose closing marker was cut off is still one where its JSON is whole."""
        if self._call_text is None:
            held, self._held = self._held, ""
            return Said(self._call([], held))
        body, self._call_text = self._call_text.text, None
        found = read_calls(body)
        return Said(self._call(found, self._opening + body), tuple(found))

    def _call(self, found: Sequence[Call], text: str) -> str:
        """What is said of a text between markers: nothing if it holds calls."""
        if not found:
            return self._say(text)
        self._called, self._blank = True, ""
        return ""

    def _say(self, text: str) -> str:
        """Content; space between calls is part of the format and none."""
        if not self._called:
            return text
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        return said


class Rest:
    """Calls from a marker to the end: Mistral's `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`; and where
    the whole answer may be one, Llama 3's `{"name": ..., "parameters": ...}`."""

    def __init__(self, markers: Sequence[str], read: Callable[[str], list[Call]], *, bare: bool = False) -> None:
        self._markers, self._read, self._bare = markers, read, bare
        self._held = Until(markers)
        self._braced = False  # what is held began with a brace, so that it may be a bare call
        self._started = False  # content was said, so that what comes is no bare call
        self._calling = False

    def push(self, text: str) -> Said:
        """Content up to what may be a marker; then nothing, until the end."""
        at = self._held.push(text)
        if self._calling:
            return Said()
        if at is not None:
            content, rest = self._held.split(at)
            self._held = Until(())
            self._held.push(rest)
            self._calling = True
            return Said(content)
        if self._bare and not self._started:
            # All before the last piece is blank unless it is braced: else it would have been said.
            if not self._braced:
                begun = self._held.last.lstrip()
                self._braced = begun.startswith("{")
            if self._braced or not begun:
                return Said()
        held = self._held.text
        keep = max((_possible(held, marker) for marker in self._markers), default=0)
        content, rest = held[: len(held) - keep], held[len(held) - keep :]
        self._held = Until(self._markers)
        self._held.push(rest)
        self._started = self._started or bool(content)
        return Said(content)

    def finish(self) -> Said:
        """Calls, or what was held as content where it is none."""
        held, self._held = self._held.text, Until(self._markers)
        body = held
        for marker in self._markers:
            if body.startswith(marker):
                body = body[len(marker) :]
        calls = self._read(body) if self._calling or (self._bare and not self._started) else []
        return Said("" if calls else held, tuple(calls))


class Forced:
    """The whole answer is a JSON list of calls, as guided decoding made it for tool_choice=required."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._held: list[str] = []
        self._new_id = new_id

    def push(self, text: str) -> Said:
        """Nothing, until the end."""
        self._held.append(text)
        return Said()

    def finish(self) -> Said:
        """The calls; what was cut off is content."""
        held = "".join(self._held)
        calls = read_calls(held)
        return Said("" if calls else held, tuple(Call(one.name, one.arguments, self._new_id()) for one in calls))


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
            found = _NAMED.fullmatch(part)
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
