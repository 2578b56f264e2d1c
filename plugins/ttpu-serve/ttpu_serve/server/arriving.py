"""Reads a request's body as it arrives, within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.events import ClientGoneError

DRAINED = 4
"""Bodies that are too large are read up to so many times the limit, for a client that still sends reads no response."""


class ArrivingBody:
    """A body of which parts arrive one after another.

    more: whether more parts come. size: bytes that have arrived.
    """

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        most: int,
        *,
        seconds: float,
        part_seconds: float,
        bytes_per_second: float | None = None,
    ) -> None:
        """
        Args:
            headers: of the request.
            receive: delivers the body's parts.
            most: the most bytes that it may have.
            seconds: in which it must have arrived.
            part_seconds: in which its next part must have arrived.
            bytes_per_second: for each so many bytes that have arrived, it may take one second more; None gives none.
        """
        self._receive, self._most, self._rate = receive, most, bytes_per_second
        self._seconds, self._part_seconds = seconds, part_seconds
        self._began = asyncio.get_running_loop().time()
        announced = headers.get("content-length", "0")
        self._dropped = announced.isdigit() and int(announced) > DRAINED * most  # so much is not read at all
        self.more, self.size = True, 0

    async def part(self) -> bytes | None:
        """Return the next part, or None at the end. One that is too large is read on for a while, and dropped.

        Raises:
            ApiError: the body is too large, or takes too long.
            ClientGoneError: the client left.
        """
        while self.more and not self._dropped:
            part = await self._next()
            if self.size <= self._most:
                return part
            self._dropped = self.size > DRAINED * self._most
        if self._dropped or self.size > self._most:
            raise ApiError(
                f"the body has more than {self._most:,} bytes, which is the most that this server reads: send less.",
                status=413,
                code="request_too_large",
            )
        return None

    async def _next(self) -> bytes:
        """Return the next part, of any size."""
        whole = self._seconds + (self.size / self._rate if self._rate else 0.0)
        deadline = min(self._began + whole, asyncio.get_running_loop().time() + self._part_seconds)
        try:
            async with asyncio.timeout_at(deadline):
                message: Any = await self._receive()
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {whole:.3g} s, or no part of it within {self._part_seconds:g}: send "
                "it faster.",
                status=408,
                kind="timeout_error",
                code="request_timeout",
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self.size += len(part)
        return part
