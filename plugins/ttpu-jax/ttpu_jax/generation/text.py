"""From token ids to text as it comes: bytes of one character arrive in several tokens, and a stop string may end in the
middle of one. In: ids, one at a time; out: text that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes one sequence and watches for stop strings.

    `prompt` ids give the decoder the context that decides whether a leading space belongs to the first new token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop_strings: Sequence[str] = ()) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=[int(token) for token in prompt], skip_special_tokens=True)
        self._stops = tuple(stop_strings)
        self._held = ""
        self._pending: list[int] = []  # tokens of a character that is not complete yet
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that this token makes certain; what might begin a stop string is held back."""
        text = self._stream.step(self._backend, token)
        self._pending = [] if text else [*self._pending, token]
        self._held += text or ""
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches)[0])
        return self._release(len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        if self._pending:
            self._held += self._backend.decode(self._pending, skip_special_tokens=True)
            self._pending = []
        return self._release(len(self._held))

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
