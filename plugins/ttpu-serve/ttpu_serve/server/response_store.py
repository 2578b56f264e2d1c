"""Responses of /v1/responses that later requests continue, in memory: the oldest go when there are too many."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ttpu_serve.server.errors import ApiError

MOST_RESPONSES = 4096
MOST_BYTES = 2**26
"""Of all stored responses, as JSON."""


@dataclass(frozen=True)
class Stored:
    """A response, with the items of the whole conversation up to its end as JSON text, and the name of its client."""

    response: dict[str, Any]
    items: str
    owner: str

    @property
    def size(self) -> int:
        """Its size in bytes, about."""
        return 2 * len(self.items) + 1024


class ResponseStore:
    """At most `most` responses, and `most_bytes` bytes of them."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, response: dict[str, Any], items: list[dict[str, Any]], owner: str) -> None:
        """Store a response. `items`: of the conversation up to its end."""
        stored = Stored(response, json.dumps(items), owner)
        if stored.size > self._most_bytes:
            return
        self._stored[response["id"]] = stored
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, name: str, owner: str, param: str | None = None) -> Stored:
        """Return a response, which counts as used now.

        Raises:
            ApiError: there is none of this name, or it is another client's.
        """
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise ApiError(
                f"the response {name[:80]!r} was asked for, but it is not stored: it was never made, or made with "
                "store=false, or is too old, or the server started again since. Send the whole conversation as input.",
                status=404,
                param=param,
                code="response_not_found",
            )
        self._stored.move_to_end(name)
        return stored

    def delete(self, name: str, owner: str) -> None:
        """Forget a response.

        Raises:
            ApiError: there is none of this name, or it is another client's.
        """
        self._bytes -= self.get(name, owner).size
        del self._stored[name]
