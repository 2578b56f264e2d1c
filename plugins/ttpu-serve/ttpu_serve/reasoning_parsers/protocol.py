"""The protocol of reasoning parsers. Reasoning is text that a model writes for itself before its final content. A
parser is an object named by an entry point of the group `ttpu.reasoning_parsers`; `--reasoning-parser` takes the entry
point's name. docs/write-a-parser.md shows how to write one."""

from __future__ import annotations

from collections.abc import Callable
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

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        ...

    def knows(self, template: str) -> int:
        """Return how surely a model with this chat template writes reasoning in this format: 0 not at all, 2 by a
        marker of its own. The parser with the highest value is used; among equals, the last by name."""
        ...

    def stream(self, prompt: str, continued: str) -> ReasoningStream:
        """Return a new stream.

        Args:
            prompt: the end of the prompt that the text follows, which may open or close reasoning.
            continued: the beginning of the reply, where the request gives one to continue; else "".
        """
        ...

    def prelude(self, prompt: str, continued: str, written: Callable[[str], str]) -> str | None:
        """Return what a reply of a prescribed form may write before it: Lark rules of llguidance of which `start` ends
        with the rule `answer`. None: the form holds from the beginning, and there is no reasoning.

        Args:
            prompt, continued: as for `stream`.
            written: returns a text as a Lark terminal, which names the token if it is a special one.
        """
        ...
