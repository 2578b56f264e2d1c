"""Answers one line of a batch as a request to its endpoint would be answered, except that nobody waits for it."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ttpu_serve.api.output_queue import EngineClosingError, EngineDeadError
from ttpu_serve.execution.errors import QueueFullError
from ttpu_serve.server.batches.endpoints import ENDPOINTS
from ttpu_serve.server.batches.lines import Line
from ttpu_serve.server.batches.room import Room
from ttpu_serve.server.errors import ApiError, as_api_error
from ttpu_serve.server.events import ARRIVAL, BACKGROUND, CLIENT
from ttpu_serve.server.given_fields import GIVEN_FIELDS, GivenFields
from ttpu_serve.server.service import Service
from ttpu_serve.server.traces import TRACE

AGAIN_SECONDS = 1.0
"""After which a line for which the engine's queue had no place is submitted again."""


@dataclass(frozen=True)
class Answer:
    """What one line's request got. body: of the response, or OpenAI's error. warning: names its fields that were
    ignored."""

    custom_id: str
    status: int
    body: dict[str, Any]
    warning: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it is what was asked for."""
        return self.status == 200

    def as_json(self) -> dict[str, Any]:
        """Return the line of the output's file."""
        response = {"status_code": self.status, "request_id": uuid.uuid4().hex, "body": self.body}
        if self.warning is not None:
            response["warning"] = self.warning
        return {"id": _new_id(), "custom_id": self.custom_id, "response": response, "error": None}


def unanswered(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the line of the errors' file for a line that got no answer."""
    return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


async def answer_line(service: Service, line: Line, room: Room, client: str) -> Answer:
    """Answer a line. It has a context of its own, so call it in a task of its own.

    Args:
        service: the engine.
        line: the request.
        room: for the sequences of all lines.
        client: whose turn at the tokenizer it takes.

    Raises:
        EngineClosingError, EngineDeadError: it was not answered.
    """
    fields = GivenFields(service.settings.strict_fields)
    GIVEN_FIELDS.set(fields)
    CLIENT.set((client, line.size))
    BACKGROUND.set(True)
    TRACE.set(None)
    try:
        body = await _answered(service, line, room)
    except (EngineClosingError, EngineDeadError):
        raise
    except Exception as error:  # whatever a request may fail with
        told = as_api_error(error)
        return Answer(line.custom_id, told.status, told.body, fields.warning)
    return Answer(line.custom_id, 200, body, fields.warning)


async def _answered(service: Service, line: Line, room: Room) -> dict[str, Any]:
    endpoint = ENDPOINTS[line.url]
    body = endpoint.body.model_validate(line.body)
    if getattr(body, "stream", None):
        raise ApiError("stream is true, but answers of batches come whole: leave it out.", param="stream")
    async with room.taken(endpoint.sequences(body)):
        while True:
            ARRIVAL.set(time.monotonic())
            try:
                return await endpoint.answer(service, body)
            except QueueFullError:
                service.engine.check_accepting()
                await asyncio.sleep(AGAIN_SECONDS)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
