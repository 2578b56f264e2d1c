"""The formats of reasoning of this distribution."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ttpu_serve.tool_parsers import harmony
from ttpu_serve.tool_parsers.incoming import Incoming, Reading

Say = Callable[[str], None]


class ReasoningReadStream:
    """Runs a reader over a text that arrives in pieces.

    Args:
        read: reads a whole text and passes its reasoning to the second argument and its content to the third one.
    """

    def __init__(self, read: Callable[[Incoming, Say, Say], Reading[None]]) -> None:
        self._text = Incoming({}, str)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._reading = read(self._text, self._reasoning.append, self._content.append)

    def push(self, text: str) -> tuple[str, str]:
        """Add text and return the (reasoning, content) that is now certain."""
        self._text.add(text)
        next(self._reading, None)
        new = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return new

    def finish(self) -> tuple[str, str]:
        """Return the (reasoning, content) that was held back."""
        self._text.ended = True
        return self.push("")


@dataclass(frozen=True)
class Delimited:
    """Reasoning at the beginning of a text, between an opening and a closing marker.

    openings, closings: markers of which each text has one. Some chat templates end the prompt with the opening one, so
    that the text begins inside the reasoning. wraps: an opening and a closing marker around the content, which are left
    out. always: the text begins inside the reasoning even if the prompt does not say so. signs: texts of which a
    template of this format has all.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    wraps: tuple[str, str] | None = None
    always: bool = False
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.openings, *self.closings, *(self.wraps or ()))

    def knows(self, template: str) -> int:
        """Return how surely a template is of this format, by its signs."""
        return 2 if self.signs and all(sign in template for sign in self.signs) else 0

    def stream(self, prompt: str, continued: str) -> ReasoningReadStream:
        """Return a new stream, inside the reasoning if the prompt or the beginning of the reply opened it."""
        state = self._state(prompt, continued)
        return ReasoningReadStream(lambda text, reason, say: self._read(text, reason, say, state))

    def prelude(self, prompt: str, continued: str, written: Callable[[str], str]) -> str | None:
        """Return the rules of reasoning before an answer: reasoning that the prompt opened ends, and other may be left
        out. None after reasoning that was closed."""
        state = self._state(prompt, continued)
        if state == "content":
            return None
        closings = [written(one) for one in self.closings]
        openings = " | ".join(written(one) for one in self.openings)
        if all(one.startswith("<[") for one in closings):  # no text contains special tokens
            thought = f"thought: FREE ({' | '.join(closings)})\nFREE: /(?s:.*)/"
        else:
            ends = "|".join(re.escape(one).replace("/", r"\/") for one in self.closings)
            thought = f"thought[lazy]: /(?s:.*)({ends})/"
        before = {"before": f"(({openings}) thought BLANKS)?", "open": f"({openings})? thought BLANKS"}
        start = before.get(state, "thought BLANKS")
        return f"start: {start} answer\n{thought}\nBLANKS: /\\n{{0,2}}/"

    def _state(self, prompt: str, continued: str) -> str:
        """Return where a reply begins: in the "reasoning", "before" it, in either ("open"), or in the "content"."""
        if continued:
            opened, closed = (
                max(continued.rfind(one) for one in markers) for markers in (self.openings, self.closings)
            )
            if closed >= 0 or opened >= 0:
                return "reasoning" if opened > closed else "content"
        end = prompt.rstrip()
        if end.endswith(self.openings):
            return "reasoning"
        return "content" if end.endswith(self.closings) else "open" if self.always else "before"

    def _read(self, text: Incoming, reason: Say, say: Say, state: str) -> Reading[None]:
        """Read a text that begins in a state of `_state`."""
        if state in ("before", "open"):
            blank = yield from text.skip()
            if not (yield from text.starts(*self.openings)):
                (say if state == "before" else reason)(blank)
                state = "content" if state == "before" else "reasoning"
            else:
                state = "reasoning"
        if state == "reasoning":
            closing = yield from text.until(self.closings, reason)
            text.take(len(closing))
            yield from text.skip("\n")
            if self.wraps is not None and (yield from text.starts(self.wraps[0])):
                yield from text.skip("\n")
                text.take(len((yield from text.until(self.wraps[1:], say))))
        yield from text.rest(say)


class Harmony:
    """The channel `analysis` of gpt-oss. Calls keep their headers, by which the tool parser knows them."""

    markers = harmony.MARKERS

    def knows(self, template: str) -> int:
        """Return how surely a template is of this format, by its channels."""
        return 2 if "<|channel|>analysis" in template else 0

    def stream(self, prompt: str, continued: str) -> ReasoningReadStream:
        """Return a new stream."""
        return ReasoningReadStream(_harmony)

    def prelude(self, prompt: str, continued: str, written: Callable[[str], str]) -> str | None:
        """Return the rules of an optional message in the channel `analysis` and the header of a final one. None if the
        tokenizer has no tokens for them."""
        tokens = {name: written(marker) for name, marker in _TOKENS.items()}
        if not all(token.startswith("<[") for token in tokens.values()):
            return None
        final = '{channel} "final" (" "? {constrain} "json")? {message} answer'
        analysis = '({channel} "analysis" {message} FREE {end} {start} "assistant")?'
        return f"start: {analysis} {final}".format(**tokens) + "\nFREE: /(?s:.*)/"


_TOKENS = {
    "start": harmony.START,
    "channel": harmony.CHANNEL,
    "message": harmony.MESSAGE,
    "end": harmony.END,
    "constrain": harmony.CONSTRAIN,
}


def _harmony(text: Incoming, reason: Say, say: Say) -> Reading[None]:
    to_someone = (yield from text.peek(4)).lstrip().startswith("to=")
    while to_someone or (yield from text.until(harmony.BEGINNINGS, say)):
        to_someone = False
        head = yield from harmony.header(text)
        if head is None:  # the text ended within a header, which says nothing
            return
        if head.recipient:
            say(head.text)
        yield from text.until(harmony.ENDINGS, reason if head.channel == "analysis" and not head.recipient else say)
        ending = yield from text.starts(harmony.END, harmony.CALL, harmony.RETURN)
        if head.recipient:
            say(ending)


THINK = Delimited(("<think>",), ("</think>",), signs=("</think>",))
DEEPSEEK_R1 = Delimited(("<think>",), ("</think>",), always=True)
SEED_OSS = Delimited(("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",))
MISTRAL = Delimited(("[THINK]",), ("[/THINK]",), signs=("[THINK]", "[/THINK]"))
KIMI_K2 = Delimited(("◁think▷",), ("◁/think▷",), signs=("◁/think▷",))
HUNYUAN = Delimited(("<think>",), ("</think>",), wraps=("<answer>", "</answer>"))
ERNIE = Delimited(("<think>",), ("</think>",), wraps=("<response>", "</response>"))
GRANITE = Delimited(
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
    wraps=("<response>", "</response>"),
    signs=("Here is my thought process:",),
)
GPT_OSS = Harmony()
