"""The body of /v1/responses, OpenAI's form of a chat with memory, and how it becomes a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ttpu_serve.server.chat_items import call_arguments, check_fields, text_field
from ttpu_serve.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest, FunctionName
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.protocol import Body, FreeJson, Unsupported, at_most

Json = dict[str, Any]
_ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "id", "status", "phase"),
    "function_call": ("call_id", "name", "arguments", "id", "status", "namespace"),
    "function_call_output": ("call_id", "output", "id", "status"),
    "reasoning": ("summary", "content", "encrypted_content", "id", "status"),
}
"""Kinds of input items that are read, with their fields."""
_ROLES = ("system", "developer", "user", "assistant")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
"""Kinds of parts that are read → the field of their text."""
_PART_FIELDS = ("type", "text", "refusal", "annotations", "logprobs")


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Json], Field(fail_fast=True), at_most(MAX_MESSAGES), BeforeValidator(_as_items)]


class FunctionTool(Body):
    """A function that the model may call. Tools that OpenAI runs itself are refused."""

    neutral: ClassVar[Unsupported] = {"defer_loading": ((False,), "tools are always shown here: leave it out")}
    place: ClassVar[str] = "tools"

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: FreeJson | None = None
    strict: bool | None = None


class NamedTool(Body):
    """The tool that must be called."""

    place: ClassVar[str] = "tool_choice"

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    """The form of the text."""

    place: ClassVar[str] = "text.format"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: FreeJson | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """What the text is like."""

    neutral: ClassVar[Unsupported] = {
        "verbosity": (("medium",), "models are not told how much to say here: say it in a message"),
    }
    place: ClassVar[str] = "text"

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How much the model thinks."""

    harmless: ClassVar[Unsupported] = {
        "summary": ((), "reasoning is given as it is: leave it out"),
        "generate_summary": ((), "reasoning is given as it is: leave it out"),
    }
    place: ClassVar[str] = "reasoning"

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    neutral: ClassVar[Unsupported] = {
        "background": ((False,), "responses are made while the client waits: leave it out"),
        "conversation": ((), "there are no conversations here: use previous_response_id"),
        "prompt": ((), "there are no stored prompts here: pass instructions and input"),
        "top_logprobs": ((0,), "they are told by /v1/chat/completions alone: ask there"),
        "truncation": (("disabled",), "conversations are not cut here: shorten the input"),
        "context_management": ((), "conversations are not cut here: leave it out"),
        "max_tool_calls": ((), "this server runs no tools: leave it out"),
        "moderation": ((), "this server moderates nothing: leave it out"),
        "messages": ((), "it is called input here: use that"),
        "max_tokens": ((), "it is called max_output_tokens here: use that"),
        "response_format": ((), "it is called text.format here: use that"),
        "stop": (([],), "it is taken by /v1/chat/completions alone: ask there"),
    }
    harmless: ClassVar[Unsupported] = {
        "include": (([],), "all that there is is told: leave it out"),
        "service_tier": (("auto", "default"), "this server has one tier: leave it out"),
        "stream_options": ((), "streams are not padded here: leave it out"),
        "prompt_cache_options": ((), "prefixes are always cached: leave it out"),
    }

    model: str = Field(description="A name that /v1/models lists.")
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # Without effect on the output by their definition.
    user: str | None = None
    metadata: FreeJson | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def chat(self, before: Sequence[Json]) -> ChatRequest:
        """Return the request as a chat's.

        Args:
            before: the items of the responses that it continues.

        Raises:
            ApiError: an item cannot be read.
            ValidationError: the chat that it makes is invalid.
        """
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked: Json = {"model": self.model, "messages": [*messages, *as_messages(self.input, before)]}
        asked |= {"temperature": self.temperature, "top_p": self.top_p, "max_completion_tokens": self.max_output_tokens}
        asked["parallel_tool_calls"] = self.parallel_tool_calls
        if self.reasoning is not None:
            asked["reasoning_effort"] = self.reasoning.effort
        if self.tools:
            functions = [tool.model_dump(include={"name", "description", "parameters"}) for tool in self.tools]
            asked["tools"] = [{"type": "function", "function": function} for function in functions]
        if isinstance(self.tool_choice, NamedTool):
            asked["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            asked["tool_choice"] = self.tool_choice
        if self.text is not None and (form := self.text.format) is not None:
            asked["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                asked["response_format"]["json_schema"] = {"name": form.name or "schema", "schema": form.schema_}
        return ChatRequest.model_validate(asked)


def as_messages(items: Sequence[Json], before: Sequence[Json] = ()) -> list[Json]:
    """Return items as messages of a chat. Reasoning, text and calls that follow each other are one message of the
    assistant.

    Args:
        items: the input of a request.
        before: items that precede it, of earlier responses.

    Raises:
        ApiError: an item is of another kind, or has a field that it must not have.
    """
    messages: list[Json] = []
    reply: Json | None = None  # the assistant's message that is made

    def of_reply() -> Json:
        nonlocal reply
        if reply is None:
            reply = {"role": "assistant", "content": None}
            messages.append(reply)
        return reply

    for number, item in enumerate([*before, *items], -len(before)):
        place = f"input[{number}]" if number >= 0 else "previous_response_id"
        kind = _kind(item, place)
        if kind == "reasoning":
            reply = None if reply is not None and (reply["content"] or reply.get("tool_calls")) else reply
            of_reply()["reasoning"] = of_reply().get("reasoning", "") + _text(item.get("content") or [], place)
        elif kind == "function_call":
            function = {"name": text_field(item, "name", place), "arguments": _arguments(item, place)}
            call = {"id": text_field(item, "call_id", place), "type": "function", "function": function}
            of_reply().setdefault("tool_calls", []).append(call)
        elif kind == "message" and item.get("role") == "assistant":
            reply = None if reply is not None and (reply["content"] or reply.get("tool_calls")) else reply
            of_reply()["content"] = _text(item.get("content"), place)
        else:
            reply = None
            if kind == "function_call_output":
                output = _text(item.get("output"), place)
                messages.append({"role": "tool", "tool_call_id": text_field(item, "call_id", place), "content": output})
            else:
                if (role := item.get("role")) not in _ROLES:
                    raise ApiError(
                        f"{place}.role is {str(role)[:40]!r}, but messages are from {', '.join(_ROLES)}: name one of "
                        "them.",
                        param=f"{place}.role",
                    )
                messages.append({"role": role, "content": _text(item.get("content"), place)})
    return messages


def _arguments(item: Json, place: str) -> str:
    """Return the arguments of a call."""
    text = text_field(item, "arguments", place)
    if place == "previous_response_id":
        return call_arguments(text, place, f"{place} names a response that called a tool with the arguments")
    return call_arguments(text, f"{place}.arguments")


def _kind(item: Json, place: str) -> str:
    """Return an item's type; a message may leave it out."""
    kind = str(item.get("type", "message" if "role" in item else ""))
    if kind not in _ITEM_FIELDS:
        found = f"is of type {kind[:40]!r}" if kind else "has no type and no role"
        raise ApiError(
            f"{place} {found}, but this model reads {', '.join(_ITEM_FIELDS)} alone: leave it out.",
            param=place,
            code="unsupported_field",
        )
    check_fields(item, ("type", *_ITEM_FIELDS[kind]), place)
    return kind


def _text(content: Any, place: str) -> str:
    """Return a content as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise ApiError(f"{place} has no text, and no list of at most {MAX_PARTS:,} parts: correct it.", param=place)
    texts = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_PARTS[kind]) if kind in _PARTS else None
        if not isinstance(text, str):
            raise ApiError(
                f"{place} has a part of type {kind[:40]!r}, but this model reads texts alone ({', '.join(_PARTS)}): "
                "leave it out.",
                param=place,
                code="unsupported_field",
            )
        check_fields(part, _PART_FIELDS, f"{place}.content")
        texts.append(text)
    return "".join(texts)
