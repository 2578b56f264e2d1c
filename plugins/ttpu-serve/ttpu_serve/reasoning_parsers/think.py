"""Parses reasoning between `<think>` and `</think>` at the beginning of a text. Some chat templates end the prompt with
the opening marker, so that the text begins inside the reasoning."""

from __future__ import annotations

from ttpu_serve.tool_parsers.json_calls import possible_marker

OPENING, CLOSING = "<think>", "</think>"


class ThinkStream:
    """Parses one text."""

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the text begins inside the reasoning."""
        self._state = "inside" if inside else "before"
        self._held = ""  # may become a marker, or is space before one

    def push(self, text: str) -> tuple[str, str]:
        """Add text and return the (reasoning, content) that is now certain."""
        text, self._held = self._held + text, ""
        if self._state == "before":
            begun = text.lstrip()
            if not begun or (OPENING.startswith(begun) and begun != OPENING):
                self._held = text
                return "", ""
            self._state = "inside" if begun.startswith(OPENING) else "after"
            text = begun.removeprefix(OPENING) if self._state == "inside" else text
        if self._state == "inside":
            return self._inside(text)
        return "", self._content(text)

    def finish(self) -> tuple[str, str]:
        """Return the (reasoning, content) that was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "inside" else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        end = text.find(CLOSING)
        if end < 0:
            keep = possible_marker(text, CLOSING)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep], ""
        self._state = "blank"
        return text[:end], self._content(text[end + len(CLOSING) :])

    def _content(self, text: str) -> str:
        """Return content without the empty lines that follow the closing marker."""
        if self._state == "blank":
            text = text.lstrip("\n")
            self._state = "after" if text else "blank"
        return text


class Think:
    """The `<think>` format."""

    markers = (OPENING, CLOSING)

    def stream(self, template: str | None) -> ThinkStream:
        """Return a new stream for the text that follows a prompt of this chat template."""
        _, asks, prompt_end = (template or "").rpartition("add_generation_prompt")
        return ThinkStream(inside=bool(asks) and OPENING in prompt_end and CLOSING not in prompt_end)


THINK = Think()
