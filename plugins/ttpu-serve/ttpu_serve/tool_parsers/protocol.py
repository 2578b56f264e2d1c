"""What a format of tool calls is. A parser is an object named by an entry point of the group `ttpu.tool_parsers`; the
entry point's name is what `--tool-call-parser` takes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


@dataclass(frozen=True)
class Parsed:
    """What a piece of text turned out to be: content, and calls that are complete."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolCallStream(Protocol):
    """Reads one generated text, piece by piece."""

    def push(self, text: str) -> Parsed:
        """What is certain after this text."""
        ...

    def finish(self) -> Parsed:
        """What was held back, at the end."""
        ...


class ToolParser(Protocol):
    """A format of tool calls.

    marker: the text that begins a call. It is part of what is parsed, though it be a special token.
    """

    marker: str

    def knows(self, template: str) -> int:
        """How surely a chat template shows this format: 0 not at all, 1 by what others may show too, 2 by a marker of
        its own. Of several installed parsers the surest reads the calls, of equally sure ones the last by name."""
        ...

    def stream(self) -> ToolCallStream:
        """A fresh reader."""
        ...

    def new_id(self) -> str:
        """An id for a call, as the model's chat template takes it."""
        ...
