"""Drafts without a model, by prompt lookup decoding (Saxena 2023): the draft is the continuation of the latest earlier
occurrence of the request's last tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.scheduling.request import Request

_BYTES = array("i").itemsize


class NgramProposer:
    """Finds the latest earlier occurrence of the last n tokens, for the largest n from `most` down to `least`.

    Tokens are stored as bytes, because `bytes.rfind` searches them at about a nanosecond each. A draft that reaches the
    end of the tokens continues with its own beginning, so that repetitions shorter than the draft are continued.

    Raises:
        RequestError: `least` and `most` are not 1 <= least <= most.
    """

    wants_hidden = False

    def __init__(self, least: int = 2, most: int = 4) -> None:
        if not 1 <= least <= most:
            raise RequestError(f"n-grams of {least} to {most} tokens were asked for: 1 <= least <= most is needed.")
        self.least, self.most = least, most
        self._texts: dict[str, tuple[Request, bytearray]] = {}

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Return up to `k` draft tokens per request."""
        return [self._draft(self._text(request), k) for request in requests]

    def on_finish(self, request: Request) -> None:
        """Drop the request's tokens."""
        self._texts.pop(request.id, None)

    def observe(self, requests: Sequence[Request], hidden: np.ndarray) -> None:
        """Ignore `hidden`, [requests, hidden]: this proposer does not use the model's states."""

    def sleep(self) -> None:
        """Do nothing: nothing is held on devices."""

    def wake_up(self) -> None:
        """Do nothing: nothing is held on devices."""

    def close(self) -> None:
        """Drop the tokens of all requests."""
        self._texts.clear()

    def _text(self, request: Request) -> bytearray:
        """Return the request's known tokens as bytes."""
        kept = self._texts.get(request.id)
        if kept is None or kept[0] is not request:
            kept = self._texts[request.id] = (request, bytearray(array("i", request.prompt).tobytes()))
        text = kept[1]
        known = len(text) // _BYTES
        if known < request.known:
            text += array("i", request.tokens(known, request.known)).tobytes()
        return text

    def _draft(self, text: bytearray, k: int) -> list[int]:
        """Return the continuation of the latest occurrence of the longest n-gram. An occurrence of a longer n-gram ends
        with one of each shorter n-gram, so one pass from the right finds all lengths."""
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
