"""The protocol of reasoning parsers. Reasoning is text that a model writes for itself before its final content. A
parser is an object named by an entry point of the group `ttpu.reasoning_parsers`; `--reasoning-parser` takes the entry
point's name."""

from __future__ import annotations

from typing import Protocol


class ReasoningStream(Protocol):
    """Parses one generated text incrementally. Its methods return (reasoning, content)."""

    def push(self, text: str) -> tuple[str, str]:
        """Add text and return the part whose kind is now certain."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, at the end."""
        ...


class ReasoningParser(Protocol):
    """A format of reasoning.

    markers: texts that begin and end the reasoning. They reach the parser even if they are special tokens.
    """

    markers: tuple[str, ...]

    def stream(self, template: str | None) -> ReasoningStream:
        """Return a new stream for the text that follows a prompt of this chat template."""
        ...
