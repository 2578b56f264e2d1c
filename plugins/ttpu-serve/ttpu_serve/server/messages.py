"""/v1/messages: whole or streamed chat completions in Anthropic's form, and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from ttpu_serve.server.blocks import Block, Blocks, Step
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.chat import Chat
from ttpu_serve.server.errors import ApiError, JSONResponse, anthropic_body, fields_named
from ttpu_serve.server.events import NamedEvents, until_gone
from ttpu_serve.server.messages_protocol import CountRequest, MessagesRequest
from ttpu_serve.server.respond import respond
from ttpu_serve.server.service import OutputStreams, Service
from ttpu_serve.server.turn import Turn

_FIELDS = {
    "messages": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "thinking.type",
    "stop": "stop_sequences",
}
"""Fields of the chat that is made of a request, and what they are in the request."""


class MessageEvents(NamedEvents):
    """Events in Anthropic's form."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as a value."""
        return anthropic_body(error)


def router(service: Service) -> APIRouter:
    """Return the endpoints' routes."""
    routes = APIRouter(tags=["Anthropic"], route_class=UniqueKeys)

    @routes.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        timeout = service.settings.write_timeout
        answer = Message(service, body)
        return await respond(request, answer, stream=bool(body.stream), write_timeout=timeout, events=MessageEvents)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """Return how many tokens a conversation has for the model."""
        service.adapter_of(body.model)
        with fields_named(_FIELDS):
            chat = body.as_chat()
        most = service.most_prompt_tokens(0)
        ids = await until_gone(request, service.chat.encode(chat, tools=chat.tool_choice != "none", most=most))
        return JSONResponse({"input_tokens": len(ids)})

    return routes


class Message:
    """One request, which is served as a chat."""

    def __init__(self, service: Service, request: MessagesRequest) -> None:
        self._service, self._request = service, request
        with fields_named(_FIELDS):
            self._chat = Chat(service, request.chat())
        self._id = f"msg_{uuid.uuid4().hex}"

    async def submit(self) -> OutputStreams:
        """Check the request and submit it to the engine."""
        with fields_named(_FIELDS):
            return await self._chat.submit()

    async def whole(self, streams: OutputStreams) -> dict[str, Any]:
        """Return the whole response."""
        turn = self._chat.turn()
        async with aclosing(streams.deltas()) as deltas:
            async for _, delta in deltas:
                turn.read(delta)
        blocks = [Block("reasoning", turn.reasoning)] if turn.reasoning else []
        blocks += [Block("text", turn.text)] if turn.text else []
        blocks += [Block("call", call.arguments, call.name, call.id) for call in turn.calls]
        told = self._envelope(streams)
        told["content"] = [_written(block) for block in blocks]
        return told | _ended(turn)

    async def chunks(self, streams: OutputStreams) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response's events as they come."""
        turn, blocks = self._chat.turn(), Blocks()
        async with aclosing(streams.deltas()) as deltas:
            async for _, delta in deltas:
                if turn.delta is None:
                    yield {"type": "message_start", "message": self._envelope(streams)}
                for step in blocks.read(turn.read(delta)):
                    yield _event(step)
        for step in blocks.end():
            yield _event(step)
        yield {"type": "message_delta", "delta": _ended(turn), "usage": _usage(streams)}
        yield {"type": "message_stop"}

    def _envelope(self, streams: OutputStreams) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(streams),
        }


def _usage(streams: OutputStreams) -> dict[str, int]:
    usage = streams.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _ended(turn: Turn) -> dict[str, Any]:
    """Return why a finished turn ended."""
    reason = (turn.delta.finish_reason if turn.delta else None) or "stop"
    stopped = turn.delta.stop_reason if turn.delta else None
    sequence = stopped if isinstance(stopped, str) else None
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}


def _written(block: Block) -> dict[str, Any]:
    """Return a whole block. A call whose arguments were cut off is a text."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.text or "{}")
    except (ValueError, RecursionError):
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _event(step: Step) -> dict[str, Any]:
    block = step.block
    if step.what == "ends":
        return {"type": "content_block_stop", "index": step.place}
    if step.what == "begins":
        empty = _written(Block(block.kind, "", block.name, block.call_id))
        return {"type": "content_block_start", "index": step.place, "content_block": empty}
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": step.text},
        "text": {"type": "text_delta", "text": step.text},
        "call": {"type": "input_json_delta", "partial_json": step.text},
    }[block.kind]
    return {"type": "content_block_delta", "index": step.place, "delta": delta}
