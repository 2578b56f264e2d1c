"""Drafts without a model: the answer often repeats the prompt, or itself. In: a request's tokens; out: what followed
the latest earlier place that looks the same (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.scheduling.request import Request

_BYTES = array("i").itemsize


class NgramProposer:
    """Finds the last n tokens again, the most that were seen before (`most` to `least`), at the latest place.

    Tokens are kept as bytes, since `bytes.rfind` searches them at about a nanosecond each. A draft that reaches the end
    of the tokens goes on with its own beginning, so that a repetition shorter than the draft is continued, too.
    """

    wants_hidden = False

    def __init__(self, least: int = 2, most: int = 4) -> None:
        if not 1 <= least <= most:
            raise RequestError(f"n-grams of {least} to {most} tokens were asked for: 1 <= least <= most is needed.")
        self.least, self.most = least, most
        self._texts: dict[str, tuple[Request, bytearray]] = {}

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Up to `k` tokens for each request."""
        return [self._draft(self._text(request), k) for request in requests]

    def on_finish(self, request: Request) -> None:
        """Forget its tokens."""
        self._texts.pop(request.id, None)

    def observe(self, requests: Sequence[Request], hidden: np.ndarray) -> None:
        """Reads nothing of the model."""

    def sleep(self) -> None:
        """Holds nothing on devices."""

    def wake_up(self) -> None:
        """Holds nothing on devices."""

    def close(self) -> None:
        """Forget all requests."""
        self._texts.clear()

    def _text(self, request: Request) -> bytearray:
        """The request's known tokens, brought up to date."""
        kept = self._texts.get(request.id)
        if kept is None or kept[0] is not request:
            kept = self._texts[request.id] = (request, bytearray(array("i", request.prompt).tobytes()))
        text = kept[1]
        known = len(text) // _BYTES
        if known < request.known:
            text += array("i", request.tokens(known, request.known)).tobytes()
        return text

    def _draft(self, text: bytearray, k: int) -> list[int]:
        """What followed the latest place of the longest n-gram. A longer one ends where its own end is found, too, so
        that one pass from the right finds all lengths."""
        size, found = len(text), -1
        end = size - 1  # the n-gram found must not be the last one itself
        for length in range(self.least, min(self.most, size // _BYTES - 1) + 1):
            gram = bytes(text[size - length * _BYTES :])
            place = text.rfind(gram, 0, end)
            while place > 0 and place % _BYTES:  # the same bytes between two tokens
                place = text.rfind(gram, 0, place + len(gram) - 1)
            if place < 0:
                break
            end = found = place + len(gram)
        if found < 0:
            return []
        copied = array("i", bytes(text[found : found + k * _BYTES])).tolist()
        return [copied[index % len(copied)] for index in range(k)] if len(copied) < k else copied
