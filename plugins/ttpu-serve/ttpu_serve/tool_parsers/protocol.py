"""The protocol of tool parsers. A parser is an object named by an entry point of the group `ttpu.tool_parsers`;
`--tool-call-parser` takes the entry point's name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Call:
    """One tool call; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


@dataclass(frozen=True)
class Parsed:
    """The result of parsing a piece of text: content and complete calls."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolCallStream(Protocol):
    """Parses one generated text incrementally."""

    def push(self, text: str) -> Parsed:
        """Add text; return the content and calls that are now certain."""
        ...

    def finish(self) -> Parsed:
        """Return what was held back, at the end."""
        ...


class ToolParser(Protocol):
    """A format of tool calls.

    marker: the text that begins a call. It reaches the parser even if it is a special token.
    """

    marker: str

    def knows(self, template: str) -> int:
        """Return how surely a chat template uses this format: 0 not at all, 1 by signs that other formats share, 2 by a
        marker of its own. The parser with the highest value is used; among equals, the last by name."""
        ...

    def stream(self) -> ToolCallStream:
        """Return a new parser of one text."""
        ...

    def new_id(self) -> str:
        """Return an id for a call, in the form that the model's chat template accepts."""
        ...
