"""The bodies of chat requests: messages, tools and the fields of `Generation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from ttpu_serve.server.body import excess
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.given_fields import given_fields
from ttpu_serve.server.protocol import MAX_DEPTH, Body, FreeJson, Generation, Unsupported, at_most

MAX_MESSAGES = 8192
MAX_PARTS = 8192
MAX_CALLS = 512
MAX_TOOLS = 512
MAX_VALUES = 100_000
"""Of the arguments of a call in the history."""

CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


def read_content(value: Any) -> str | None:
    """Return a message's content as one text; text parts are joined, other parts refused.

    Raises:
        ValueError: the content has another form, too many parts, or a part that is not text.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a text, or a list of parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"it has {len(value):,} parts, but at most {MAX_PARTS:,} are allowed")
    texts = []
    for part in value:
        if not isinstance(part, Mapping):
            raise ValueError('its parts must be objects, such as {"type": "text", "text": "..."}')
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise ValueError(f"it has a part of type {kind!r}, but this model reads text alone")
        if not isinstance(part.get(kind), str):
            raise ValueError(f"it has a part without {kind!r}")
        for other in sorted(set(part) - {"type", kind}):
            if reason := given_fields().refusal_of(str(other), "messages.content", ("type", "text", "refusal")):
                raise ValueError(f"it has a part with {other!r}, but {reason}")
        texts.append(part[kind])
    return "".join(texts)


Content = Annotated[str | None, PlainValidator(read_content), WithJsonSchema(CONTENT_SCHEMA)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def parsable(text: str) -> str:
    """Check that arguments of a call, which templates get as values, are not too many or too deep.

    Raises:
        ValueError: they are; it says what follows `arguments is ...: `.
    """
    found = excess(text.encode(errors="replace"), MAX_VALUES, MAX_DEPTH)
    if found is not None:
        raise ValueError(f"it {found}")
    return text


class CalledFunction(Body):
    """The called function; `arguments` is JSON text as the model wrote it."""

    place: ClassVar[str] = "messages.tool_calls.function"

    name: str
    arguments: Annotated[str, AfterValidator(parsable)]


class CalledTool(Body):
    """A tool call of an earlier message."""

    place: ClassVar[str] = "messages.tool_calls"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message. Messages of role tool name the call whose result they are."""

    neutral: ClassVar[Unsupported] = {
        "function_call": ((), "it is OpenAI's old form of tool_calls: use those"),
        "audio": ((), "this server hears and speaks no audio: leave it out"),
        "refusal": ((), "refusals are not told apart from content here: pass it as content"),
        "annotations": (([],), "replies have none here: leave it out"),
    }
    place: ClassVar[str] = "messages"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True), at_most(MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="vLLM's newer name of reasoning_content.")

    @model_validator(mode="after")
    def _belongs_together(self) -> Message:
        reasons = self.reasoning_content is not None or self.reasoning is not None
        if self.content is None and not (self.role == "assistant" and (self.tool_calls is not None or reasons)):
            raise ValueError(f"a message of role {self.role} needs content")
        if reasons and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has reasoning, which only assistant messages may")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has tool_calls, which only assistant messages may")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id whose result it is")
        return self


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of an object."""

    place: ClassVar[str] = "tools.function"

    name: FunctionName
    description: str | None = None
    parameters: FreeJson | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; only functions are supported."""

    place: ClassVar[str] = "tools"

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a tool."""

    place: ClassVar[str] = "tool_choice.function"

    name: FunctionName


class ToolChoice(Body):
    """The tool that must be called."""

    place: ClassVar[str] = "tool_choice"

    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)]


class Conversation(Body):
    """The fields that a chat template renders into a prompt."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: FreeJson | None = None


class ChatRequest(Generation, Conversation):
    """The body of /v1/chat/completions."""

    neutral: ClassVar[Unsupported] = {
        **Generation.neutral,
        "functions": (([],), "it is OpenAI's old form of tools: use those"),
        "function_call": (("none", "auto"), "it is OpenAI's old form of tool_choice: use that"),
        "modalities": ((["text"],), "this server speaks text alone: leave it out"),
        "audio": ((), "this server speaks no audio: leave it out"),
        "verbosity": (("medium",), "models are not told how much to say here: say it in a message"),
        "web_search_options": ((), "this server searches nothing: leave it out"),
        # vLLM's
        "chat_template": ((), "templates of clients are not run: start the server with --chat-template"),
        "documents": (([],), "templates get no documents here: write them into a message"),
        "best_of": ((1,), "replies of chats are not ranked here: ask for n of them and choose"),
        "detokenize": ((True,), "replies are read from their text: use return_token_ids"),
        "enable_thinking": ((), "it belongs to the chat template: use chat_template_kwargs"),
        "thinking": ((), "it belongs to the chat template: use chat_template_kwargs"),
    }
    harmless: ClassVar[Unsupported] = {
        **Generation.harmless,
        "prediction": ((), "predicted outputs are not used here: leave it out"),
        "mm_processor_kwargs": (({},), "this model reads text alone: leave it out"),
        "media_io_kwargs": (({},), "this model reads text alone: leave it out"),
    }

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, lt=2**31)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # vLLM's
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    echo: bool | None = Field(None, description="Replies begin with the last message, if it is the assistant's.")
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                "the field 'top_logprobs' was given without logprobs=true: set that, or leave it out.",
                param="top_logprobs",
            )
        if self.max_tokens == 0:
            raise ApiError("max_tokens is 0, but an output has 1 token or more: raise it.", param="max_tokens")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(
                "max_tokens and max_completion_tokens were both given, but they mean the same: pass one of them.",
                param="max_tokens",
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ApiError("two tools have the same name: rename one of them.", param="tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ApiError(
                "a tool must be called by 'tool_choice', but no tools were given: pass some, or leave it out.",
                param="tool_choice",
            )
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None
        if chosen is not None and chosen not in names:
            raise ApiError(
                f"tool_choice names {chosen!r}, but the tools are {', '.join(names)}: name one of those.",
                param="tool_choice",
            )


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: FreeJson | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("a prompt or messages are needed, and not both: pass one of them.", param="prompt")
        return self
