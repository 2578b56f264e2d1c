"""The body of /v1/messages, Anthropic's form of a chat, and how it becomes a `ChatRequest`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ttpu_serve.server.chat_items import call_arguments, check_fields, text_field
from ttpu_serve.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest, FunctionName
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.protocol import Body, FreeJson, Texts, Unsupported, at_most

_BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content"),
}
"""Kinds of blocks that are read, with their fields."""


def _flattened(value: Any) -> Any:
    """Return blocks as they are, and a text as one block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Block = dict[str, Any]
BlockList = Annotated[list[Block], Field(fail_fast=True), at_most(MAX_PARTS), BeforeValidator(_flattened)]


class AnthropicMessage(Body):
    """One message: a text, or blocks."""

    place: ClassVar[str] = "messages"

    role: Literal["user", "assistant"]
    content: BlockList


class AnthropicTool(Body):
    """A function that the model may call. Tools that Anthropic runs itself are refused."""

    harmless: ClassVar[Unsupported] = {
        "cache_control": ((), "prefixes are always cached: leave it out"),
        "input_examples": (([],), "templates show no examples: leave it out"),
    }
    place: ClassVar[str] = "tools"

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: FreeJson
    strict: bool | None = None


class AnthropicToolChoice(Body):
    """Whether a tool is called, and which."""

    place: ClassVar[str] = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks, and how many tokens it may think."""

    harmless: ClassVar[Unsupported] = {"display": ((), "thinking is shown as it is: leave it out")}
    place: ClassVar[str] = "thinking"

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    neutral: ClassVar[Unsupported] = {
        "mcp_servers": (([],), "this server calls no other servers: leave it out"),
        "context_management": ((), "conversations are not cut here: leave it out"),
        "container": ((), "this server runs no containers: leave it out"),
        "output_config": (({},), "it is not read here: use /v1/chat/completions with response_format"),
        "output_format": ((), "it is not read here: use /v1/chat/completions with response_format"),
        "stop": (([],), "it is called stop_sequences here: use that"),
    }
    harmless: ClassVar[Unsupported] = {
        "cache_control": ((), "prefixes are always cached: leave it out"),
        "service_tier": (("auto", "standard_only"), "this server has one tier: leave it out"),
        "inference_geo": ((), "this server is where it is: leave it out"),
    }

    model: str = Field(description="A name that /v1/models lists.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
    system: BlockList | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None

    def as_chat(self, **more: Any) -> ChatRequest:
        """Return the request as a chat's; `more` are further fields of it.

        Raises:
            ApiError: a block cannot be read.
            ValidationError: the chat that it makes is invalid.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _texts(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += _turns(message, f"messages[{number}].content")
        asked: dict[str, Any] = {"model": self.model, "messages": messages, **more}
        if self.messages[-1].role == "assistant":
            asked["continue_final_message"] = True
        if self.tools:
            asked["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            if (choice.name is None) == (choice.type == "tool"):
                raise ApiError(
                    f"tool_choice is of type {choice.type!r} and has "
                    f"{'no name' if choice.name is None else 'a name'}, but a tool's name belongs to the type 'tool' "
                    "alone: correct it.",
                    param="tool_choice",
                )
            named = {"type": "function", "function": {"name": choice.name}}
            asked["tool_choice"] = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
            asked["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type == "disabled":
            asked["reasoning_effort"] = "none"
        elif self.thinking is not None:
            asked["thinking_token_budget"] = self.thinking.budget_tokens
        return ChatRequest.model_validate(asked)


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    metadata: FreeJson | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a chat's, with what it says of the answer."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return self.as_chat(stop=self.stop_sequences, **{name: getattr(self, name) for name in names})


def _turns(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """Return a message as messages of a chat: results of tools are messages of their own."""
    made: list[dict[str, Any]] = []
    said: list[Block] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def close() -> None:
        if said:
            made.append({"role": message.role, "content": _texts(said, place)})
            said.clear()

    for number, block in enumerate(message.content):
        kind = _checked(block, place)
        own = f"{place}[{number}]"
        if kind == "text":
            said.append(block)
        elif kind == "tool_result" and message.role == "user":
            close()
            result = _texts(_flattened(block.get("content") or ""), f"{place}.content")
            made.append({"role": "tool", "tool_call_id": text_field(block, "tool_use_id", own), "content": result})
        elif message.role != "assistant" or kind == "tool_result":
            raise ApiError(
                f"{place} has a block of type {kind!r}, which {message.role} messages may not have: leave it out.",
                param=place,
            )
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            arguments = call_arguments(json.dumps(block.get("input") or {}), f"{own}.input")
            function = {"name": text_field(block, "name", own), "arguments": arguments}
            calls.append({"id": text_field(block, "id", own), "type": "function", "function": function})
    if message.role == "assistant":
        turn: dict[str, Any] = {"role": "assistant", "content": _texts(said, place) if said or not calls else None}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning"] = "".join(thoughts)
        return [turn]
    close()
    return made or [{"role": "user", "content": ""}]


def _texts(blocks: list[Block], place: str) -> str:
    """Return text blocks as one text."""
    texts = []
    for block in blocks:
        kind = _checked(block, place)
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ApiError(
                f"{place} has a block of type {kind!r}, but only blocks of type 'text' with a 'text' can be here: "
                "leave it out.",
                param=place,
            )
        texts.append(block["text"])
    return "".join(texts)


def _checked(block: Any, place: str) -> str:
    """Return a block's type.

    Raises:
        ApiError: the block is of another kind, or has a field that it must not have.
    """
    kind = str(block.get("type", "")) if isinstance(block, Mapping) else type(block).__name__
    if kind not in _BLOCK_FIELDS:
        found = f"of type {kind[:40]!r}" if kind else "without a type"
        raise ApiError(
            f"{place} has a block {found}, but this model reads {', '.join(_BLOCK_FIELDS)} alone: "
            "leave it out.",
            param=place,
            code="unsupported_field",
        )
    read = {name: value for name, value in block.items() if name != "cache_control"}
    check_fields(read, ("type", *_BLOCK_FIELDS[kind]), place)
    return kind
