"""Streams responses as server-sent events and stops when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ttpu_serve.server.errors import ApiError, as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
ARRIVAL: ContextVar[float] = ContextVar("ARRIVAL")
"""When the running request was there as a whole, by `time.monotonic`: its deadline counts from then."""
CLIENT: ContextVar[tuple[str, int]] = ContextVar("CLIENT", default=("", 0))
"""Who sent the running request, its key or its address, and how many bytes its body has."""
BACKGROUND: ContextVar[bool] = ContextVar("BACKGROUND", default=False)
"""Whether nobody waits for the running request's answer: it is a line of a batch."""


class ClientGoneError(Exception):
    """The client closed its connection, so no one reads the response."""


class EventStream(Response):
    """Sends each value as a JSON event, then `[DONE]`. An error on the way is sent as the last event before it.

    If the client disconnects, or leaves one event unread for `write_timeout` seconds, the iterator is closed. `end` is
    always called at the end, because an iterator that never started runs no cleanup. `last` is sent at the end.
    """

    media_type = "text/event-stream"
    last = DONE

    def __init__(
        self,
        values: AsyncGenerator[dict[str, Any], None],
        write_timeout: float | None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._values = values
        self._write_timeout = write_timeout
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client reads.

        Raises:
            Exception: the error of sending, except a timeout.
        """
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._values.aclose()
            self._end()
        error = sending.exception() if sending.done() and not sending.cancelled() else None
        if error is not None and not isinstance(error, TimeoutError):
            raise error

    def event(self, value: dict[str, Any]) -> bytes:
        """Return a value as an event."""
        return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as a value."""
        return error.body

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for value in self._values:
                await self._write(send, self.event(value))
        except TimeoutError:
            raise
        except Exception as error:  # the status is sent, so that an event is all that can tell it
            await self._write(send, self.event(self.error(as_api_error(error))))
        if self.last:
            await self._write(send, self.last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._write_timeout):
            await send({"type": "http.response.body", "body": body, "more_body": True})


class NamedEvents(EventStream):
    """Sends each value as an event that is named by its `type`, without a last event of the stream's own."""

    last = b""

    def event(self, value: dict[str, Any]) -> bytes:
        """Return a value as an event."""
        return b"event: %b\n%b" % (str(value["type"]).encode(), super().event(value))


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it if the client disconnects first. Errors of `work` propagate.

    Raises:
        ClientGoneError: the client disconnected.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
