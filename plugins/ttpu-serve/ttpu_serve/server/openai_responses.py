"""/v1/responses: OpenAI's newer form of a chat, whole or streamed, which may continue an earlier response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from ttpu_serve.server.blocks import Block, Blocks, Step
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.chat import Chat
from ttpu_serve.server.client_key import owner_of
from ttpu_serve.server.errors import ApiError, JSONResponse, fields_named
from ttpu_serve.server.events import NamedEvents
from ttpu_serve.server.openai_responses_protocol import ResponsesRequest
from ttpu_serve.server.respond import respond
from ttpu_serve.server.response_store import ResponseStore
from ttpu_serve.server.service import OutputStreams, Service
from ttpu_serve.server.turn import Turn

_FIELDS = {"messages": "input", "reasoning_effort": "reasoning.effort", "max_completion_tokens": "max_output_tokens"}
"""Fields of the chat that is made of a request, and what they are in the request."""
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseEvents(NamedEvents):
    """Events in the form of OpenAI's Responses API."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as a value."""
        told = error.body["error"]
        return {"type": "error", "sequence_number": 0, **{name: told[name] for name in ("code", "message", "param")}}


def router(service: Service) -> APIRouter:
    """Return the endpoints' routes."""
    routes = APIRouter(tags=["OpenAI"], route_class=UniqueKeys)
    store = ResponseStore()

    @routes.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, after the conversation that ended with `previous_response_id`."""
        timeout = service.settings.write_timeout
        answer = OneResponse(service, body, store, owner_of(request))
        return await respond(request, answer, stream=bool(body.stream), write_timeout=timeout, events=ResponseEvents)

    @routes.get("/v1/responses/{name}")
    async def retrieve(name: str, request: Request) -> Response:
        """Return a stored response."""
        return JSONResponse(store.get(name, owner_of(request)).response)

    @routes.delete("/v1/responses/{name}")
    async def delete(name: str, request: Request) -> Response:
        """Forget a stored response."""
        store.delete(name, owner_of(request))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    return routes


class OneResponse:
    """One request, which is served as a chat."""

    def __init__(self, service: Service, request: ResponsesRequest, store: ResponseStore, owner: str) -> None:
        self._service, self._request, self._store, self._owner = service, request, store, owner
        before = request.previous_response_id
        items = "[]" if before is None else store.get(before, owner, "previous_response_id").items
        self._before: list[dict[str, Any]] = json.loads(items)
        with fields_named(_FIELDS):
            self._chat = Chat(service, request.chat(self._before))
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._ids: dict[int, str] = {}
        self._thought = 0  # tokens of reasoning
        self._thought_letters = 0  # of these tokens
        self._thinks = True  # nothing but reasoning has come

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
                self._count(turn)
        blocks = [Block("reasoning", turn.reasoning)] if turn.reasoning else []
        blocks += [Block("text", turn.text)] if turn.text else []
        blocks += [Block("call", call.arguments, call.name, call.id) for call in turn.calls]
        return self._finished([self._item(place, block) for place, block in enumerate(blocks)], turn, streams)

    async def chunks(self, streams: OutputStreams) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response's events as they come."""
        turn, blocks = self._chat.turn(), Blocks()
        number = 0

        def event(kind: str, **values: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **values}

        began = self._envelope("in_progress")
        yield event("response.created", response=began)
        yield event("response.in_progress", response=began)
        async with aclosing(streams.deltas()) as deltas:
            async for _, delta in deltas:
                new = turn.read(delta)
                self._count(turn)
                for step in blocks.read(new):
                    for kind, values in self._told(step):
                        yield event(kind, **values)
        for step in blocks.end():
            for kind, values in self._told(step):
                yield event(kind, **values)
        items = [self._item(place, block) for place, block in enumerate(blocks.blocks)]
        finished = self._finished(items, turn, streams)
        yield event(f"response.{finished['status']}", response=finished)

    def _count(self, turn: Turn) -> None:
        """Count the tokens so far as reasoning while there is nothing else. Of the first piece that holds something
        else too, count the share that its letters of reasoning have."""
        if not (self._thinks and turn.reasoning):
            return
        letters = len(turn.reasoning) - self._thought_letters
        others = len(turn.text) + sum(len(call.name) + len(call.arguments) for call in turn.calls)
        new = len(turn.ids) - self._thought
        if others and letters:
            new = max(1, round(new * letters / (letters + others)))
        self._thought += new if letters or not others else 0
        self._thought_letters, self._thinks = len(turn.reasoning), not others

    def _told(self, step: Step) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and values of the events that tell of a step."""
        block, place = step.block, {"output_index": step.place}
        item = self._item(step.place, block, done=step.what == "ends")
        part = place | {"item_id": item["id"], "content_index": 0}
        kind = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        if block.kind == "call":
            part = place | {"item_id": item["id"]}
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if step.what == "grows":
            yield f"response.{kind}.delta", part | {"delta": step.text} | more
        elif step.what == "begins":
            yield "response.output_item.added", place | {"item": item}
            if block.kind != "call":
                yield "response.content_part.added", part | {"part": _part(block)}
        else:
            if block.kind == "call":
                yield f"response.{kind}.done", part | {"arguments": block.text, "name": block.name}
            else:
                yield f"response.{kind}.done", part | {"text": block.text} | more
                yield "response.content_part.done", part | {"part": _part(block)}
            yield "response.output_item.done", place | {"item": item}

    def _item(self, place: int, block: Block, *, done: bool = True) -> dict[str, Any]:
        """Return a block as an item of the output."""
        name = self._ids.setdefault(place, f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        status = "completed" if done else "in_progress"
        parts = [_part(block)] if done else []
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": name, **call, "status": status}
        if block.kind == "text":
            return {"type": "message", "id": name, "role": "assistant", "content": parts, "status": status}
        return {"type": "reasoning", "id": name, "summary": [], "content": parts, "status": status}

    def _finished(self, output: list[dict[str, Any]], turn: Turn, streams: OutputStreams) -> dict[str, Any]:
        """Return the finished response, and store it."""
        cut = turn.delta is not None and turn.delta.finish_reason == "length"
        told = self._envelope("incomplete" if cut else "completed")
        told["output"] = output
        if cut:
            told["incomplete_details"] = {"reason": "max_output_tokens"}
            output[-1:] = [{**item, "status": "incomplete"} for item in output[-1:]]
        usage = streams.usage
        told["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": usage.prompt + usage.completion,
        }
        if self._request.store is not False:
            self._store.put(told, [*self._before, *self._request.input, *output], self._owner)
        return told

    def _envelope(self, status: str) -> dict[str, Any]:
        request = self._request
        asked = request.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice"})
        form = request.text.format if request.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": block.text}
