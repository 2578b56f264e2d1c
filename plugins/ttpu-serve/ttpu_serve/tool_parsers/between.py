"""Calls between two markers, anywhere in the text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Hermes
and Qwen models write them."""

from __future__ import annotations

from collections.abc import Sequence

from ttpu_serve.tool_parsers.json_calls import Until, possible_marker, read_calls
from ttpu_serve.tool_parsers.protocol import Call, Parsed


class Between:
    """Reads calls between an opening and a closing marker. What is there and no call is content."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._held = ""  # what may begin the opening marker
        self._call_text: Until | None = None  # after one
        self._blank = ""  # space at the end of what was said, once a call was made
        self._called = False

    def push(self, text: str) -> Parsed:
        """Content up to what may be a marker, and calls that are complete."""
        content = ""
        calls: list[Call] = []
        while True:
            if self._call_text is None:
                text, self._held = self._held + text, ""
                start = text.find(self._opening)
                if start < 0:
                    start = len(text) - possible_marker(text, self._opening)
                    self._held = text[start:]
                    return Parsed(content + self._say(text[:start]), tuple(calls))
                content += self._say(text[:start])
                text = text[start + len(self._opening) :]
                self._call_text = Until((self._closing,))
            at = self._call_text.push(text)
            if at is None:
                return Parsed(content, tuple(calls))
            body, text = self._call_text.split(at)
            self._call_text = None
            text = text[len(self._closing) :]
            found = read_calls(body)
            content += self._call(found, self._opening + body + self._closing)
            calls += found

    def finish(self) -> Parsed:
        """A call whose closing marker was cut off is still one where its JSON is whole."""
        if self._call_text is None:
            held, self._held = self._held, ""
            return Parsed(self._call([], held))
        body, self._call_text = self._call_text.text, None
        found = read_calls(body)
        return Parsed(self._call(found, self._opening + body), tuple(found))

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


class BetweenMarkers:
    """The format."""

    def __init__(self, opening: str, closing: str) -> None:
        self.marker, self._closing = opening, closing

    def knows(self, template: str) -> int:
        """Whether the template shows the opening marker."""
        return 2 if self.marker in template else 0

    def stream(self) -> Between:
        """A fresh reader."""
        return Between(self.marker, self._closing)

    def new_id(self) -> str:
        """An id for a call."""
        return Call("", "").id


HERMES = BetweenMarkers("<tool_call>", "</tool_call>")
