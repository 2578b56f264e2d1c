"""The protocol of tool parsers. A parser is an object named by an entry point of the group `ttpu.tool_parsers`;
`--tool-call-parser` takes the entry point's name. docs/write-a-parser.md shows how to write one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Mapping[str, Mapping[str, Any]]
"""Names of the tools that a request offers, each with the JSON schema of its arguments ({} if it has none)."""


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of which the name is known; its arguments follow."""

    name: str
    id: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True)
class CallEnds:
    """The call that began last is complete."""


@dataclass(frozen=True)
class CallBreaks:
    """The call that began last will not be complete: the text ended, or is no call of this format. `text` is the call
    as the model wrote it, which a whole answer returns as content; a stream has sent a part of it as a call."""

    text: str


Event = Content | CallBegins | Arguments | CallEnds | CallBreaks


class ToolCallStream(Protocol):
    """Parses one generated text incrementally."""

    def push(self, text: str) -> Sequence[Event]:
        """Add text; return the events that are now certain."""
        ...

    def finish(self) -> Sequence[Event]:
        """Return the events of what was held back, at the end."""
        ...


class ToolParser(Protocol):
    """A format of tool calls.

    markers: texts of the format. They reach the parser even if they are special tokens.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        ...

    def knows(self, template: str) -> int:
        """Return how surely a chat template uses this format: 0 not at all, 1 by signs that other formats share, 2 by a
        marker of its own, 3 by several. The parser with the highest value is used; among equals, the last by name."""
        ...

    def stream(self, tools: Tools) -> ToolCallStream:
        """Return a new parser of one text, in which these tools may be called."""
        ...

    def new_id(self) -> str:
        """Return an id for a call, in the form that the model's chat template accepts."""
        ...


def new_id() -> str:
    """Return an id for a call, as OpenAI's API writes them."""
    return "call_" + secrets.token_hex(12)
