"""Reads JSON request bodies and refuses objects with duplicate keys, because one of the two values would be dropped
silently."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ttpu_serve.server.errors import ApiError


class UniqueKeys(APIRoute):
    """A route that refuses bodies with duplicate keys."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler, preceded by the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if body := await request.body():
                # What is no JSON, the framework reads again, and says what is wrong.
                with suppress(ValueError, RecursionError):
                    request._json = json.loads(body, object_pairs_hook=_unique)
            return await handle(request)

        return checked


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                message = f"the field {name!r} was given twice in one object: leave one of them out."
                raise ApiError(message, param=name)
            seen.add(name)
    return found
