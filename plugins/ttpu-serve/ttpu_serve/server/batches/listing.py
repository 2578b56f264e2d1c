"""Pages of lists, as OpenAI's clients walk through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ttpu_serve.server.errors import ApiError


class Listed(Protocol):
    """What lists hold."""

    @property
    def id(self) -> str:
        """Its name."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        ...


def paged(items: Sequence[Listed], after: str | None, limit: int) -> dict[str, Any]:
    """Return one page of a list in OpenAI's form.

    Args:
        items: all objects in order.
        after: the id after which the page begins; None is the first page.
        limit: the most objects of a page.

    Raises:
        ApiError: there is no object of the id `after`.
    """
    begin = 0
    if after is not None:
        begin = next((place + 1 for place, item in enumerate(items) if item.id == after), -1)
        if begin < 0:
            message = f"after is {after[:80]!r}, but the list has no such id: pass the last id of the page before."
            raise ApiError(message, param="after")
    page = [item.as_json() for item in items[begin : begin + limit]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": begin + limit < len(items)}
