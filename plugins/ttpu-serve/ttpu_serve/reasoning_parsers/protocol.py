"""What a format of reasoning is: text that a model writes for itself before it answers. A parser is an object named by
an entry point of the group `ttpu.reasoning_parsers`; the entry point's name is what `--reasoning-parser` takes."""

from __future__ import annotations

from typing import Protocol


class ReasoningStream(Protocol):
    """Reads one generated text, piece by piece. Each piece is (reasoning, content)."""

    def push(self, text: str) -> tuple[str, str]:
        """What is certain after this text."""
        ...

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end."""
        ...


class ReasoningParser(Protocol):
    """A format of reasoning.

    markers: texts that begin and end it. They are part of what is parsed, though they be special tokens.
    """

    markers: tuple[str, ...]

    def stream(self, template: str | None) -> ReasoningStream:
        """A fresh reader of what follows a prompt of this chat template."""
        ...
