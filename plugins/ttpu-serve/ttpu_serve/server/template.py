"""Renders messages and tools into prompt ids, with the checkpoint's chat template or the server's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.chat_template import chat_text, template_text
from ttpu_serve.api.template_variables import check_variables
from ttpu_serve.server.chat_protocol import ChatRequest, Conversation, Message, TokenizeRequest
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.thinking import options_of, thinking_variables
from ttpu_serve.server.tokens import Tokens

_END = 256  # characters, among which a template opens or closes reasoning


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: its token ids, and the end of its text."""

    ids: list[int]
    end: str


class ChatTemplate:
    """Renders conversations. `text` is the template; None if there is none, and then chats are refused. `defaults`: the
    template's variables where a request does not say."""

    def __init__(
        self, tokens: Tokens, override: str | None = None, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._tokens, self._defaults = tokens, dict(defaults)
        self._override = override
        self.text: str | None = override or template_text(tokens.tokenizer)
        self._variables = options_of(self.text or "")

    @property
    def knows_tools(self) -> bool:
        """Whether the template presents tools to the model."""
        return self.text is not None and "tools" in self.text

    async def prompt(self, request: Conversation, *, tools: bool = True, most: int | None = None) -> ChatPrompt:
        """Return the prompt of a chat, as `encode` does its ids."""
        prompt: ChatPrompt = await self._tokens.run(self._prompt, request, tools, most)
        return prompt

    async def encode(
        self, request: Conversation | TokenizeRequest, *, tools: bool = True, most: int | None = None
    ) -> list[int]:
        """Return the prompt's ids. A text that has many more than `most` tokens is refused without reading all of it.

        Raises:
            ApiError: there is no template, or it refuses the messages.
            RequestError: the text is too long.
        """
        prompt: ChatPrompt = await self._tokens.run(self._prompt, request, tools, most)
        return prompt.ids

    def _prompt(self, request: Conversation | TokenizeRequest, tools: bool, most: int | None) -> ChatPrompt:
        text = self.render(request, tools=tools)
        ids = self._tokens.encode_now(text, bool(request.add_special_tokens), most, "messages")
        return ChatPrompt(ids, text[-_END:])

    def render(self, request: Conversation | TokenizeRequest, *, tools: bool = True) -> str:
        """Return the prompt's text. `tools`: whether the template is told of the request's tools.

        Raises:
            ApiError: there is no template, or it refuses the messages or knows nothing of what was asked.
            RequestError: a variable has the name of an argument of rendering.
        """
        if self.text is None:
            raise ApiError(
                "a chat was asked for, but this model has no chat template: use /v1/completions, or start the server "
                "with --chat-template.",
                param="messages",
            )
        going_on = bool(request.continue_final_message)
        opening = (not going_on) if request.add_generation_prompt is None else request.add_generation_prompt
        if going_on and opening:
            raise ApiError(
                "continue_final_message and add_generation_prompt are both true, but a reply either continues the "
                "last message or begins a new one: set one of them.",
                param="continue_final_message",
            )
        given = request.chat_template_kwargs or {}
        check_variables(given)
        if isinstance(request, ChatRequest):
            thinking = thinking_variables(self._variables, request.reasoning_effort, request.thinking_token_budget)
            given = {**self._defaults, **thinking, **given}
        else:
            given = {**self._defaults, **given}
        shown = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if tools else []
        messages = request.messages or ()

        def text(*, arguments_as_text: bool = False) -> str:
            return chat_text(
                self._tokens.tokenizer,
                [as_turn(message, arguments_as_text=arguments_as_text) for message in messages],
                template=self._override,
                tools=shown,
                add_generation_prompt=opening,
                continue_final_message=going_on,
                variables=given,
            )

        try:
            return text()
        except RequestError as error:  # of the template: "System role not supported", for example
            if any(message.tool_calls for message in messages):
                with suppress(RequestError):  # DeepSeek's templates, for example, add them to a text
                    return text(arguments_as_text=True)
            raise ApiError(str(error), param="messages") from error


def as_turn(message: Message, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """Return a message as templates expect it. `arguments_as_text`: arguments of tool calls are JSON text, and not
    values."""
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = "" if message.content is None else message.content
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if reasoning := message.reasoning_content or message.reasoning:
        turn |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
        if message.content and message.tool_calls:  # gpt-oss's template, which reads `thinking`, refuses both
            turn["thinking"] = ""
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments if arguments_as_text else _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def read_template(given: str) -> str:
    """Return a template from a file, or `given` itself if it looks like a template.

    Raises:
        RequestError: `given` is no template and no readable file.
    """
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RequestError(
            f"the chat template {given!r} was asked for, but it cannot be read ({error}): name a file, or pass a Jinja "
            "template."
        ) from error


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
