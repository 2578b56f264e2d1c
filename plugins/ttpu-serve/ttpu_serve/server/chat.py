"""/v1/chat/completions: whole or streamed chat completions in OpenAI's form, with tool calls and reasoning."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.server import forced_calls, sampling
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.chat_protocol import ChatRequest, Tool, ToolChoice
from ttpu_serve.server.errors import ApiError, fields_named
from ttpu_serve.server.respond import respond
from ttpu_serve.server.responses import TokenLogprobs, chat_logprobs, prompt_logprobs
from ttpu_serve.server.service import TRUNCATED, OutputStreams, Service
from ttpu_serve.server.tokens import kept
from ttpu_serve.server.turn import Turn
from ttpu_serve.tool_parsers.json_calls import forced_stream
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, Content, Event, new_id


def router(service: Service) -> APIRouter:
    """Return the endpoint's routes."""
    routes = APIRouter(route_class=UniqueKeys)

    @routes.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        timeout = service.settings.write_timeout
        return await respond(request, Chat(service, body), stream=bool(body.stream), write_timeout=timeout)

    return routes


class Chat:
    """One chat request."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._service, self._request = service, request
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._tools: Sequence[Tool] = request.tools or ()
        self._choice = (request.tool_choice or "auto") if self._tools else "none"
        self._top = request.top_logprobs or 0
        self._reasons = True  # there is none where a grammar holds from the first token on
        self._ids: list[int] = []  # of the prompt
        self._prompt = ""  # the end of its text

    async def submit(self) -> OutputStreams:
        """Check the request and submit it to the engine."""
        service, request = self._service, self._request
        adapter = service.adapter_of(request.model)
        service.check_choices(1, request.num_sequences)
        self._check_tools()
        params = sampling.of_chat(request, service.settings.default_sampling, self._guide())
        params = self._with_markers(params)
        cut, most = request.truncate_prompt_tokens, service.most_prompt_tokens()
        read = most if cut is None else TRUNCATED * most
        prompt = await service.chat.prompt(request, tools=self._choice != "none", most=read)
        ids = prompt.ids if cut is None else kept(prompt.ids, most if cut == -1 else cut, "last")
        service.check_length(ids, "messages")
        self._ids, self._prompt = ids, prompt.end
        if params.guided is not None:
            params = await service.tokens.run(self._with_prelude, params)
        with fields_named({"logprobs": "top_logprobs"}):
            return await service.submit([ids], params, request, adapter=adapter)

    async def whole(self, streams: OutputStreams) -> dict[str, Any]:
        """Return the whole response."""
        turns = [self.turn() for _ in range(self._request.num_sequences)]
        of_prompt: dict[str, Any] = {}
        async with aclosing(streams.deltas()) as deltas:
            async for number, delta in deltas:
                of_prompt |= self._of_prompt(delta)
                turns[number].read(delta)
        told = self._envelope("chat.completion")
        told["choices"] = [self._message(number, turn) for number, turn in enumerate(turns)]
        told["usage"] = streams.usage.as_json()
        if self._request.return_token_ids:
            told["prompt_token_ids"] = self._ids
        return told | of_prompt

    async def chunks(self, streams: OutputStreams) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response's chunks as they come."""
        turns = [self.turn() for _ in range(self._request.num_sequences)]
        counted: dict[str, Any] = {"usage": None} if self._request.includes_usage else {}
        of_prompt: dict[str, Any] = {"prompt_token_ids": self._ids} if self._request.return_token_ids else {}
        async with aclosing(streams.deltas()) as deltas:
            async for number, delta in deltas:
                of_prompt |= self._of_prompt(delta)
                if self._request.continuous_usage:
                    counted = {"usage": streams.usage.as_json()}
                for choice in self._pieces(number, turns[number], delta):
                    yield {**self._envelope("chat.completion.chunk"), "choices": [choice], **counted, **of_prompt}
                    of_prompt = {}
        if self._request.includes_usage:
            usage = streams.usage.as_json()
            yield {**self._envelope("chat.completion.chunk"), "choices": [], "usage": usage}

    def _of_prompt(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the log-probabilities of the prompt, if the delta has them: the first one of the first reply does."""
        if delta.prompt_logprobs is None:
            return {}
        count = self._request.prompt_logprobs or 0
        return {"prompt_logprobs": prompt_logprobs(delta.prompt_logprobs, count, self._service.tokens)}

    def _pieces(self, number: int, turn: Turn, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return a delta as choices of chunks: first the role, then reasoning, content and calls, and the finish
        reason."""
        pieces: list[dict[str, Any]] = []

        def piece(delta_json: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> None:
            pieces.append({"index": number, "delta": delta_json, "logprobs": logprobs, "finish_reason": reason})

        if turn.delta is None:
            piece({"role": "assistant", "content": "" if turn.named is None else None})
            if self._echoed:
                piece({"content": self._echoed})
        place = turn.begun - 1  # of the call that began last
        new = turn.read(delta)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if new.reasoning:
            piece(_reasoning(new.reasoning), logprobs=logprobs)
            logprobs = None  # told with the first piece
        for event in new.events:
            place += isinstance(event, CallBegins)
            if (told := _told(event, place)) is not None:
                piece(told, logprobs=logprobs)
                logprobs = None
        if logprobs is not None:
            arguing = turn.named is not None and turn.begun
            piece({"tool_calls": [_arguments("", place)]} if arguing else {"content": ""}, logprobs=logprobs)
        if delta.finish_reason is not None:
            piece({}, turn.ended_by(delta.finish_reason))
            if delta.stop_reason is not None:
                pieces[-1]["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids and pieces:
            pieces[0]["token_ids"], turn.ids = turn.ids, []
        return pieces

    def _message(self, number: int, turn: Turn) -> dict[str, Any]:
        """Return a finished turn as a choice."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None}
        if turn.reasoning_parser is not None and turn.reasons:
            message |= _reasoning(turn.reasoning or None)
        if turn.calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        reason = turn.ended_by((turn.delta.finish_reason if turn.delta else None) or "stop")
        told = {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(turn.logprobs),
            "finish_reason": reason,
        }
        if turn.delta is not None and turn.delta.stop_reason is not None:
            told["stop_reason"] = turn.delta.stop_reason
        if self._request.return_token_ids:
            told["token_ids"] = turn.ids
        return told

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model or self._service.names[0],
            "system_fingerprint": None,
        }

    def turn(self) -> Turn:
        """Return a new reply, which the request's parsers read."""
        parser, reasoning = self._service.tool_parser, self._service.reasoning_parser
        make_id = new_id if parser is None else parser.new_id
        tools = {tool.function.name: tool.function.parameters or {} for tool in self._tools}
        turn = Turn()
        if reasoning is not None and self._reasons:
            turn.reasoning_parser = reasoning.stream(self._prompt, self._continued)
            turn.reasons = self._request.include_reasoning is not False
        if isinstance(self._choice, ToolChoice):
            turn.named = CallBegins(self._choice.function.name, make_id())
        elif self._choice == "required":
            turn.parser = forced_stream(tools, make_id)
        elif self._choice == "auto" and parser is not None:
            turn.parser, turn.most = parser.stream(tools), 1 if self._request.parallel_tool_calls is False else None
        return turn

    @property
    def _continued(self) -> str:
        """The beginning of the reply that the request gives."""
        return (self._request.messages[-1].content or "") if self._request.continue_final_message else ""

    @property
    def _echoed(self) -> str:
        """What replies repeat of the conversation: its last message, if it is the assistant's as they are."""
        last = self._request.messages[-1]
        return (last.content or "") if self._request.echo and last.role == "assistant" else ""

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return chat_logprobs(logprobs, self._top, self._service.tokens, as_ids=as_ids)

    def _check_tools(self) -> None:
        """Check that the chat template presents tools to the model and that a parser reads its calls."""
        if self._choice == "none" or not self._tools:
            return
        if not self._service.chat.knows_tools:
            raise ApiError(
                "tools were given, but the model's chat template does not tell it of tools: use a model that was "
                "trained to call them, or start the server with a --chat-template that does.",
                param="tools",
            )
        if self._choice == "auto" and self._service.tool_parser is None:
            raise ApiError(
                "tools were given, but the chat template does not show how its model calls them: start the server with "
                "--tool-call-parser, or pass tool_choice 'required' or the name of one.",
                param="tools",
            )

    def _guide(self) -> GuidedDecoding | None:
        """Return the form that the output must match if a tool call is required."""
        if isinstance(self._choice, ToolChoice):
            name = self._choice.function.name
            return forced_calls.forced_arguments(next(tool for tool in self._tools if tool.function.name == name))
        if self._choice == "required":
            most = 1 if self._request.parallel_tool_calls is False else None
            return forced_calls.forced_calls(self._tools, most=most)
        return None

    def _with_prelude(self, params: SamplingParams) -> SamplingParams:
        """Return parameters whose guide lets reasoning come before the prescribed form, where the parser knows how."""
        guided, reasoning, prelude = params.guided, self._service.reasoning_parser, None
        if guided is not None and guided.grammar is None and reasoning is not None:
            prelude = reasoning.prelude(self._prompt, self._continued, self._service.tokens.terminal)
        self._reasons = prelude is not None
        return params if guided is None else replace(params, guided=replace(guided, prelude=prelude))

    def _with_markers(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that keep the markers of calls and reasoning in the generated text, even if they are
        special tokens."""
        parser, reasoning = self._service.tool_parser, self._service.reasoning_parser
        markers = [] if reasoning is None else [*reasoning.markers]
        if self._choice == "auto" and parser is not None:
            markers += parser.markers
        if self._request.skip_special_tokens is not None or not any(map(self._service.tokens.is_special, markers)):
            return params
        return replace(params, skip_special_tokens=False)


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return reasoning under both names that clients know: the older one, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _told(event: Event, place: int) -> dict[str, Any] | None:
    """Return an event as the delta of a chunk, if it has one. `place`: the number of the call that it belongs to."""
    match event:
        case Content(text):
            return {"content": text}
        case CallBegins(name, call_id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": place, "id": call_id, "type": "function", "function": function}]}
        case Arguments(text):
            return {"tool_calls": [_arguments(text, place)]}
        case _:
            return None


def _arguments(text: str, place: int) -> dict[str, Any]:
    return {"index": place, "function": {"arguments": text}}
