"""Turns token ids into text while they are generated. It yields only text that is certain: the bytes of one character
arrive in several tokens, and a stop string may end in the middle of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

HALF = "\ufffd"
"""What a decoder writes for bytes that are no whole character, or not yet."""

_LONGEST_CHARACTER = 4  # bytes, and so tokens
_CONTEXT = 16  # tokens of a prompt that say how its output begins; an output costs no more where the prompt is long
_LOOK_BACK = 256  # tokens before those among which a place to begin is looked for


class TextStream:
    """Decodes one sequence and watches for stop strings.

    `prompt` ids give the decoder the context that decides whether a leading space belongs to the first new token. A
    token's text is what it adds to the text of those before it: tokenizers' own `DecodeStream` raises where bytes that
    turn out to be no character change what was decoded before them, which byte-fallback tokenizers such as Llama 2's
    do, and takes a prompt that ends within a character for new text.

    armed: whether stop strings count. While they do not, what may begin one is held back all the same, since one that
    ends later counts; one that has ended by then is text."""

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
        self._name = getattr(tokenizer, "convert_ids_to_tokens", None) if backend is None else backend.id_to_token
        self._window = self._context(prompt)  # tokens that are decoded together: some known, then new ones
        self._known = len(self._window)
        self._known_text = self._decode(self._window)
        self._stops = tuple(stop_strings)
        self._held = ""
        self._unarmed = 0  # characters of `_held` that came while stop strings did not count
        self.armed = True
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Text that this token makes certain; what might begin a stop string is held back."""
        self._window.append(token)
        whole = self._decode(self._window)
        text = whole[len(self._known_text) :]
        if not text:
            if whole == self._known_text and whole and not whole.endswith(HALF):
                self._window.pop()  # a special token, say: many of them would all be decoded again each time
            return ""
        if text.endswith(HALF):
            if len(self._window) - self._known <= _LONGEST_CHARACTER:
                return ""
            return self._take(self._without_half(text))
        self._window = self._window[self._known :]
        self._known, self._known_text = len(self._window), self._decode(self._window)
        return self._take(text)

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        whole = self._decode(self._window)
        self._held += whole[len(self._known_text) :]
        self._known, self._known_text = len(self._window), whole
        return self._release(len(self._held))

    def _take(self, text: str) -> str:
        """Certain text: what of it, and of what was held, cannot belong to a stop string."""
        self._held += text
        if not self.armed:
            self._unarmed = len(self._held)
        matches = [
            (at, stop)
            for stop in self._stops
            if (at := self._held.find(stop, max(0, self._unarmed + 1 - len(stop)))) >= 0
        ]
        if matches:
            at, self.stopped_by = min(matches)
            return self._release(at)
        return self._release(len(self._held) - self._possible_stop())

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from where their text is what it is within the whole; all of it where no such
        place is near."""
        last = len(prompt) - _CONTEXT
        for start in range(last, max(last - _LOOK_BACK, 0), -1):
            part = [int(token) for token in prompt[start : start + _LONGEST_CHARACTER]]
            # Bytes in a row are text or none as a whole; a special token between them does not part them.
            if not self._is_byte(part[0]) and self._decode(part[:1]) and not self._decode(part).startswith(HALF):
                return [int(token) for token in prompt[start:]]
        return [int(token) for token in prompt]

    def _is_byte(self, token: int) -> bool:
        """Whether it is one byte of a byte-fallback tokenizer."""
        name = self._name(token) if self._name is not None else None
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x") and name.endswith(">")

    def _without_half(self, text: str) -> str:
        """The part of too many tokens' text that is certain, though it is no character: the last three bytes may still
        become one. The window is cut to the tokens that decide on what follows: the first ones, since a run of bytes
        that begins as no text is none, and the last."""
        held = min(len(text) - len(text.rstrip(HALF)), _LONGEST_CHARACTER - 1)
        window = self._window[self._known :]
        if len(window) > 4 * _LONGEST_CHARACTER:
            window = window[:_LONGEST_CHARACTER] + window[-3 * _LONGEST_CHARACTER :]
        self._window, self._known = window, 0
        self._known_text = self._decode(window)[:-held]
        return text[:-held]

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._unarmed = max(0, self._unarmed - length)
        self.text += text
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(len(stop) > length and stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
