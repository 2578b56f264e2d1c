"""Responds to one request for generation, with the whole response or with an event stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request, Response

from ttpu_serve.server.errors import JSONResponse
from ttpu_serve.server.events import EventStream, until_gone
from ttpu_serve.server.service import OutputStreams


class Generation(Protocol):
    """A checked request, as an endpoint writes its response."""

    async def submit(self) -> OutputStreams:
        """Submit it to the engine."""
        ...

    async def whole(self, streams: OutputStreams) -> dict[str, Any]:
        """Return the response when all sequences are complete."""
        ...

    def chunks(self, streams: OutputStreams) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response's parts as they come."""
        ...


async def respond(
    request: Request,
    generation: Generation,
    *,
    stream: bool,
    write_timeout: float | None,
    events: type[EventStream] = EventStream,
) -> Response:
    """Submit a request and return its response. If the client leaves, the request is aborted.

    Args:
        request: the HTTP request.
        generation: what it asks for.
        stream: return a stream of events.
        write_timeout: seconds in which the client must read an event; None is any number.
        events: the form of the stream.

    Raises:
        ClientGoneError: the client left before the response began.
    """
    streams = await until_gone(request, generation.submit())
    if stream:
        return events(generation.chunks(streams), write_timeout, streams.close)
    try:
        return JSONResponse(await until_gone(request, generation.whole(streams)))
    finally:
        streams.close()
