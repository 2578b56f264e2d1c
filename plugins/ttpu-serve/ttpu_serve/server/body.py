"""Reads JSON request bodies. It refuses objects with duplicate keys, because one of the two values would be dropped
silently, and bodies of very many or very nested values, which would keep all other clients waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.events import CLIENT

MOST_DEPTH = 256
"""Objects and arrays in one another."""
MOST_CONTAINERS = 50_000
"""Objects and arrays of a body."""
LONG = 2**16
"""Bytes from which a body is parsed in a thread for long ones, at which clients take turns."""


class UniqueKeys(APIRoute):
    """A route that refuses bodies with duplicate keys, or with too many values."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler, preceded by the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if body := await request.body():
                service = request.app.state.service
                most: int = service.most_values
                # What is no JSON, the framework reads again, and says what is wrong.
                with suppress(ValueError):
                    if len(body) < LONG:
                        request._json = parsed(body, most)
                    else:
                        reading = service.bodies.submit(CLIENT.get()[0], partial(parsed, body, most))
                        request._json = await asyncio.wrap_future(reading)
            return await handle(request)

        return checked


def parsed(body: bytes, most_values: int) -> Any:
    """Return the value of a body.

    Args:
        body: JSON.
        most_values: the most values that it may have.

    Raises:
        ApiError: a key is there twice, or there are too many values, or they are too deep in one another.
        ValueError: it is no JSON.
    """
    check_shape(body, most_values)
    return json.loads(body, object_pairs_hook=_unique)


def check_shape(body: bytes, most_values: int) -> None:
    """Check how many values a body has, and how deep they are in one another, without parsing it.

    Raises:
        ApiError: there are too many, or they are too deep.
    """
    if (found := excess(body, most_values)) is not None:
        raise ApiError(f"the body {found}: send less.", code="request_too_large")


def excess(body: bytes, most_values: int, most_depth: int = MOST_DEPTH) -> str | None:
    """Return what JSON has too much of, as a clause, without parsing it; None if it may be parsed.

    Args:
        body: JSON, or any other bytes.
        most_values: the most values that it may have.
        most_depth: the most objects and arrays in one another.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers <= most_depth and containers + body.count(b",") <= most_values:
        return None
    length = LONG  # of the beginning that is looked at: one that holds too much is refused for it alone
    while True:
        found = _excess(_without_texts(body[:length]), most_values, most_depth)  # texts hold commas and brackets too
        if found is not None or length >= len(body):
            return found
        length *= 2


def _without_texts(body: bytes) -> np.ndarray:
    """Return the letters of JSON, uint8, but not those in its texts; one without an end goes to the end."""
    if b"\\" in body:  # an escaped quote ends no text; pairs of backslashes first, for they escape no quote
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(body, np.uint8)
    in_text = np.cumsum(letters == ord('"'), dtype=np.uint8) & 1
    return letters[in_text == 0]


def _excess(rest: np.ndarray, most_values: int, most_depth: int) -> str | None:
    """Return what JSON without its texts has too much of."""
    opens = (rest == ord("[")) | (rest == ord("{"))
    closes = (rest == ord("]")) | (rest == ord("}"))
    containers = int(np.count_nonzero(opens))
    values = containers + int(np.count_nonzero(rest == ord(",")))
    depth = int(np.where(opens[opens | closes], 1, -1).cumsum().max(initial=0))
    for found, most, what in (
        (depth, most_depth, "levels of objects and arrays in one another"),
        (containers, MOST_CONTAINERS, "objects and arrays"),
        (values, most_values, "values"),
    ):
        if found > most:
            return f"has {found:,} {what} or more, but this server reads at most {most:,}"
    return None


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
