"""Tool calls between two markers, anywhere in the text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as
Hermes and Qwen models write them."""

from __future__ import annotations

from collections.abc import Sequence

from ttpu_serve.tool_parsers.json_calls import Until, possible_marker, read_calls
from ttpu_serve.tool_parsers.protocol import Call, Parsed


class Between:
    """Parses calls between an opening and a closing marker. Text that is not a call is content."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._held = ""  # what may begin the opening marker
        self._call_text: Until | None = None  # after one
        self._blank = ""  # space at the end of what was said, once a call was made
        self._called = False

    def push(self, text: str) -> Parsed:
        """Add text; return content before any possible marker, and complete calls."""
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
        """Return what was held back. A call without its closing marker counts if its JSON is complete."""
        if self._call_text is None:
            held, self._held = self._held, ""
            return Parsed(self._call([], held))
        body, self._call_text = self._call_text.text, None
        found = read_calls(body)
        return Parsed(self._call(found, self._opening + body), tuple(found))

    def _call(self, found: Sequence[Call], text: str) -> str:
        """Parse the text between markers as calls; text that holds none becomes content."""
        if not found:
            return self._say(text)
        self._called, self._blank = True, ""
        return ""

    def _say(self, text: str) -> str:
        """Add content; whitespace between calls belongs to the format."""
        if not self._called:
            return text
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        return said


class BetweenMarkers:
    """A format of calls between two markers."""

    def __init__(self, opening: str, closing: str) -> None:
        self.marker, self._closing = opening, closing

    def knows(self, template: str) -> int:
        """Return how surely the template uses this format, by its opening marker."""
        return 2 if self.marker in template else 0

    def stream(self) -> Between:
        """Return a new parser of one text."""
        return Between(self.marker, self._closing)

    def new_id(self) -> str:
        """Return an id for a call."""
        return Call("", "").id


HERMES = BetweenMarkers("<tool_call>", "</tool_call>")
