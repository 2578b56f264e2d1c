"""Tool calls from a marker to the end of the text: Mistral's `[TOOL_CALLS][{...}, ...]` or
`[TOOL_CALLS]name[ARGS]{...}`, and Llama 3's `{"name": ..., "parameters": ...}`, which may be the whole text."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence

from ttpu_serve.tool_parsers.json_calls import Until, is_json, possible_marker, read_calls
from ttpu_serve.tool_parsers.protocol import Call, Parsed

_NAMED = re.compile(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
_LETTERS = string.ascii_letters + string.digits


class Rest:
    """Parses calls from a marker to the end. With `bare`, calls at the beginning of the text need no marker."""

    def __init__(self, markers: Sequence[str], read: Callable[[str], list[Call]], *, bare: bool = False) -> None:
        self._markers, self._read, self._bare = markers, read, bare
        self._held = Until(markers)
        self._braced = False  # what is held began with a brace, so that it may be a bare call
        self._started = False  # content was said, so that what comes is no bare call
        self._calling = False

    def push(self, text: str) -> Parsed:
        """Add text; return content before a possible marker, then nothing until the end."""
        at = self._held.push(text)
        if self._calling:
            return Parsed()
        if at is not None:
            content, rest = self._held.split(at)
            self._held = Until(())
            self._held.push(rest)
            self._calling = True
            return Parsed(content)
        if self._bare and not self._started:
            # All before the last piece is blank unless it is braced: else it would have been said.
            if not self._braced:
                begun = self._held.last.lstrip()
                self._braced = begun.startswith("{")
            if self._braced or not begun:
                return Parsed()
        held = self._held.text
        keep = max((possible_marker(held, marker) for marker in self._markers), default=0)
        content, rest = held[: len(held) - keep], held[len(held) - keep :]
        self._held = Until(self._markers)
        self._held.push(rest)
        self._started = self._started or bool(content)
        return Parsed(content)

    def finish(self) -> Parsed:
        """Return the calls, or the held text as content if it is no call."""
        held, self._held = self._held.text, Until(self._markers)
        body = held
        for marker in self._markers:
            if body.startswith(marker):
                body = body[len(marker) :]
        calls = self._read(body) if self._calling or (self._bare and not self._started) else []
        return Parsed("" if calls else held, tuple(calls))


class Llama3Json:
    """Llama 3's format: `{"name": ..., "parameters": ...}` as the whole text or after `<|python_tag|>`."""

    marker = "<|python_tag|>"

    def knows(self, template: str) -> int:
        """Return how surely the template uses this format, by its marker or by the word parameters."""
        return 2 if self.marker in template else int('"parameters"' in template)

    def stream(self) -> Rest:
        """Return a new parser of one text."""
        return Rest((self.marker,), read_calls, bare=True)

    def new_id(self) -> str:
        """Return an id for a call."""
        return Call("", "").id


class Mistral:
    """Mistral's format: `[TOOL_CALLS]`, then a list of calls, or names with their arguments."""

    marker = "[TOOL_CALLS]"

    def knows(self, template: str) -> int:
        """Return how surely the template uses this format, by its marker."""
        return 2 if self.marker in template else 0

    def stream(self) -> Rest:
        """Return a new parser of one text."""
        return Rest((self.marker,), _named_calls)

    def new_id(self) -> str:
        """Return nine random letters and digits, which Mistral's templates require."""
        return short_id()


LLAMA3_JSON, MISTRAL = Llama3Json(), Mistral()


def _named_calls(text: str) -> list[Call]:
    """Parse a JSON list, or `name[ARGS]{...}` per call, with ids of nine letters, which Mistral's templates require."""
    calls = read_calls(text)
    if not calls:
        for part in text.split("[TOOL_CALLS]"):
            found = _NAMED.fullmatch(part)
            if found is None or not is_json(found[2]):
                return []
            calls.append(Call(found[1], found[2]))
    return [Call(call.name, call.arguments, short_id()) for call in calls]


def short_id() -> str:
    """Return nine random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
