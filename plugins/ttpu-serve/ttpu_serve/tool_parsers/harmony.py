"""Reads the harmony format of gpt-oss: messages of `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT
<|message|>TEXT<|end|>`. Reasoning is in the channel `analysis`; a message to `functions.NAME` is a call, which ends
with `<|call|>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ttpu_serve.tool_parsers.incoming import Incoming, Reading
from ttpu_serve.tool_parsers.json_values import json_value

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
BEGINNINGS = (START, CHANNEL, MESSAGE)
ENDINGS = (END, CALL, RETURN, START, CHANNEL)
"""A message ends where the next one begins, too."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class Header:
    """What stands before a message: the channel, the recipient ("" if none), and the text of both as it was written."""

    channel: str
    recipient: str
    text: str


def header(text: Incoming) -> Reading[Header | None]:
    """Read a header with its `<|message|>`; None if the text ends within it."""
    parts: list[str] = []
    if not (yield from text.until((MESSAGE,), parts.append)):
        return None
    written = "".join(parts)
    channel, recipient = _CHANNEL.search(written), _RECIPIENT.search(written)
    text.take(len(MESSAGE))
    return Header(channel[1] if channel else "", recipient[1] if recipient else "", written + MESSAGE)


def read_calls(text: Incoming) -> Reading[None]:
    """Read messages: those to functions as calls, the others as content. The first one may begin with its recipient,
    since the prompt ends with `<|start|>assistant`."""
    text.keep()
    yield from text.skip()
    to_someone = (yield from text.peek(3)) == "to="
    if not to_someone:
        text.settle(call=False)
    while to_someone or (yield from text.until(BEGINNINGS, text.say)):
        if not to_someone:
            text.keep()
        to_someone = False
        head = yield from header(text)
        if head is None:
            text.settle(call=False)
            return
        if head.recipient.startswith("functions."):
            yield from text.skip()
            text.begin(head.recipient.removeprefix("functions."))
            complete = yield from json_value(text, text.argue)
            text.settle(call=complete)
        else:
            text.forget()
        yield from text.until(ENDINGS, text.say)
        yield from text.starts(END, CALL, RETURN)
