"""From token ids to text as it comes: bytes of one character arrive in several tokens, and a stop string may end in the
middle of one. In: ids, one at a time; out: text that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

HALF = "\ufffd"
"""What a decoder writes for bytes that are no whole character, or not yet."""


class TextStream:
    """Decodes one sequence and watches for stop strings.

    `prompt` ids give the decoder the context that decides whether a leading space belongs to the first new token. A
    token's text is what it adds to the text of those before it: tokenizers' own `DecodeStream` raises where bytes that
    turn out to be no character change what was decoded before them, which byte-fallback tokenizers such as Llama 2's
    do, and takes a prompt that ends within a character for new text."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False) if backend is None else backend.decode
        self._decode = partial(decode, skip_special_tokens=skip_special_tokens)
        self._window = [int(token) for token in prompt]  # tokens that are decoded together: some known, then new ones
        self._known = len(self._window)
        self._known_text = self._decode(self._window)
        self._stops = tuple(stop_strings)
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def watch(self, stop_strings: Sequence[str]) -> None:
        """Look for these from the next token on."""
        self._stops = tuple(stop_strings)

    def push(self, token: int) -> str:
        """Text that this token makes certain; what might begin a stop string is held back."""
        self._window.append(token)
        text = self._new_text()
        if not text or text.endswith(HALF):
            return ""
        self._window = self._window[self._known :]
        self._known, self._known_text = len(self._window), self._decode(self._window)
        self._held += text
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            at, self.stopped_by = min(matches)
            return self._release(at)
        return self._release(len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._new_text()
        self._known, self._known_text = len(self._window), self._decode(self._window)
        return self._release(len(self._held))

    def _new_text(self) -> str:
        """What the window's new tokens add to the text of the known ones."""
        return self._decode(self._window)[len(self._known_text) :]

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self.text += text
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
