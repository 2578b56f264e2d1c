"""Text that arrives in pieces, for parsers that are written as if the whole text were there. A parser is a generator
function: it reads with `yield from` and waits at a bare `yield` inside the methods here until more text has come. What
it finds depends on the text alone and not on how it is cut into pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, CallBreaks, CallEnds, Content, Event, Tools

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads from the incoming text and returns a T."""

BLANK = " \t\r\n"


@cache
def _first_of(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Return a pattern of the marker that begins first, of several the longest, and the length of the longest."""
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), len(longest_first[0])


class Incoming:
    """The text so far, the events found in it, and the tools that may be called in it.

    Methods that return a `Reading` are for `yield from`. An empty string from `peek` means that the text has ended.

    Args:
        tools: the tools that the request offers.
        new_id: makes the id of a call.
    """

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        self.tools, self._new_id = tools, new_id
        self.ended = False
        self._events: list[Event] = []
        self._text, self._at = "", 0  # what came, and how much of it was consumed
        self._kept: list[str] | None = None  # what was consumed since `keep`
        self._begun = False  # a call began and is not settled
        self._called = False  # a call was complete, so that blanks belong to the format
        self._said = False  # content was said that is not blank
        self._blank = ""  # blanks that are content only if more content follows

    def add(self, text: str) -> None:
        """Add text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def events(self) -> list[Event]:
        """Return the events since the last call of this method, adjacent texts joined."""
        events, self._events = self._events, []
        return events

    # -- reading -------------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Reading[str]:
        """Return the next `count` characters, or fewer at the end of the text, and leave them there."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Consume and return characters that have come, at most `count`."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def run_of(self, characters: str) -> str:
        """Consume and return the characters of this set that come next and have come already."""
        end = self._at
        while end < len(self._text) and self._text[end] in characters:
            end += 1
        return self.take(end - self._at)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consume and return what of the text that has come matches a pattern."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def come(self) -> str:
        """Return the text that has come and is not consumed."""
        return self._text[self._at :]

    def skip(self, characters: str = BLANK) -> Reading[str]:
        """Consume and return all characters of this set that come next."""
        skipped = ""
        while (next_one := (yield from self.peek())) and next_one in characters:
            skipped += self.run_of(characters)
        return skipped

    def starts(self, *markers: str) -> Reading[str]:
        """Consume and return the first of the markers with which the text goes on; "" if it goes on otherwise."""
        for marker in markers:
            length = 1
            while length < len(marker) and (yield from self.peek(length)) == marker[:length]:
                length += 1
            if (yield from self.peek(length)) == marker:
                return self.take(length)
        return ""

    def until(self, markers: Sequence[str], say: Callable[[str], None]) -> Reading[str]:
        """Pass the text before the first of the markers to `say`, as soon as it is certain, and return the marker,
        which is not consumed. "": the text ended without one."""
        pattern, longest = _first_of(tuple(markers))
        while True:
            text = self._text
            found = pattern.search(text, self._at)
            certain = len(text) if found is None else found.start()
            if not self.ended:
                for start in range(max(self._at, len(text) - longest + 1), min(certain + 1, len(text))):
                    if any(len(one) > len(text) - start and one.startswith(text[start:]) for one in markers):
                        found, certain = None, start
                        break
            if certain > self._at:
                say(self.take(certain - self._at))
            if found is not None or self.ended:
                return "" if found is None else found[0]
            yield

    def rest(self, say: Callable[[str], None]) -> Reading[None]:
        """Pass all that comes to `say`."""
        while True:
            say(self.take(len(self.come())))
            if self.ended:
                return
            yield

    # -- telling -------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Add content. Blanks before the first call and between calls belong to the format and are left out; where
        there is no call they are content."""
        text, self._blank = self._blank + text, ""
        if self._called:
            self._blank = text[len(text.rstrip()) :]
        elif not self._said and not text.strip():
            self._blank = text
        if len(text) > len(self._blank):
            self._said = True
            self._tell(Content(text[: len(text) - len(self._blank)]))

    def keep(self) -> None:
        """Remember what is consumed from here on: it is content unless it turns out to be a call."""
        self._kept, self._blank = [self._blank], ""

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self._begun = True
        self._events.append(CallBegins(name, call_id or self._new_id()))

    def argue(self, text: str) -> None:
        """Add to the JSON text of the call's arguments."""
        if text:
            self._tell(Arguments(text))

    def settle(self, *, call: bool) -> None:
        """End what began with `keep`: a call that is complete, or text that is none."""
        kept, self._kept = "".join(self._kept or ()), None
        if call:
            self._called = True
            self._events.append(CallEnds())
        elif self._begun:
            self._said = True
            self._events.append(CallBreaks(kept))
        else:
            self.say(kept)
        self._begun = False

    def forget(self) -> None:
        """Drop what was kept: it belongs to the format."""
        self._kept = None

    def end(self) -> None:
        """Say the blanks that were held back."""
        if self._blank and not self._called:
            self._tell(Content(self._blank))
        self._blank = ""

    def _tell(self, event: Content | Arguments) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Content) and isinstance(event, Content):
            self._events[-1] = Content(last.text + event.text)
        elif isinstance(last, Arguments) and isinstance(event, Arguments):
            self._events[-1] = Arguments(last.text + event.text)
        else:
            self._events.append(event)


class ReadStream:
    """Runs a parser over a text that arrives in pieces.

    Args:
        text: the text.
        reading: the parser; text that it leaves is content.
    """

    def __init__(self, text: Incoming, reading: Reading[None]) -> None:
        self._text = text
        self._reading: Reading[None] | None = reading

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are now certain."""
        self._text.add(text)
        self._go_on()
        return self._text.events()

    def finish(self) -> list[Event]:
        """Return the events of what was held back."""
        self._text.ended = True
        self._go_on()
        self._text.end()
        return self._text.events()

    def _go_on(self) -> None:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        if self._reading is None:
            self._text.say(self._text.take(len(self._text.come())))
