"""The formats of this distribution, each a marker, a reader and the signs by which a chat template shows it."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from ttpu_serve.tool_parsers import harmony
from ttpu_serve.tool_parsers.incoming import BLANK, Incoming, Reading, ReadStream
from ttpu_serve.tool_parsers.json_calls import json_calls
from ttpu_serve.tool_parsers.json_values import json_value
from ttpu_serve.tool_parsers.markup_calls import INVOKE, argument_pairs, function_parameters
from ttpu_serve.tool_parsers.protocol import Tools, new_id
from ttpu_serve.tool_parsers.python_calls import python_calls

_NAME = string.ascii_letters + string.digits + "_.-"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits


def short_id() -> str:
    """Return nine random letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class Format:
    """A format of tool calls, by a reader of text.

    markers: texts of the format. read: reads a whole text, of which it says the content. signs: texts of which a
    template of this format has all. sure: see `ToolParser.knows`. new_id: makes the id of a call.
    """

    markers: tuple[str, ...]
    read: Callable[[Incoming], Reading[None]]
    signs: tuple[str, ...] = ()
    sure: int = 2
    new_id: Callable[[], str] = new_id

    def knows(self, template: str) -> int:
        """Return how surely the template uses this format."""
        return self.sure if self.signs and all(sign in template for sign in self.signs) else 0

    def stream(self, tools: Tools) -> ReadStream:
        """Return a new parser of one text."""
        text = Incoming(tools, self.new_id)
        return ReadStream(text, self.read(text))


def between(opening: str, *closings: str) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of JSON calls behind an opening marker, anywhere in the text. A closing marker may be
    missing."""

    def read(text: Incoming) -> Reading[None]:
        while (yield from text.until((opening,), text.say)):
            text.keep()
            text.take(len(opening))
            yield from json_calls(text, closings)

    return read


def leading(openings: tuple[str, ...], closings: tuple[str, ...], brackets: str) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of JSON calls behind one of some markers anywhere, or at the beginning of the text without one,
    if the text begins with one of `brackets` and calls a tool that the request offers."""

    def read(text: Incoming) -> Reading[None]:
        text.keep()
        yield from text.skip()
        first = yield from text.peek()
        if first and first in brackets:
            yield from json_calls(text, closings, known=True)
        else:
            text.settle(call=False)
        while opening := (yield from text.until(openings, text.say)):
            text.keep()
            text.take(len(opening))
            yield from json_calls(text, closings)

    return read


def _mistral(text: Incoming) -> Reading[None]:
    """Read `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    while (yield from text.until(("[TOOL_CALLS]",), text.say)):
        text.keep()
        text.take(len("[TOOL_CALLS]"))
        yield from text.skip()
        first = yield from text.peek()
        if first and first in "[{":
            yield from json_calls(text)
        else:
            text.settle(call=(yield from _mistral_call(text)))


def _mistral_call(text: Incoming) -> Reading[bool]:
    name, call_id = (yield from text.skip(_NAME)), ""
    yield from text.skip()
    if (yield from text.starts("[CALL_ID]")):
        call_id = yield from text.skip(_LETTERS + "_-")
    yield from text.starts("[ARGS]")
    yield from text.skip()
    if not name or (yield from text.peek()) != "{":
        return False
    text.begin(name, call_id if _SHORT_ID.fullmatch(call_id) else None)
    return (yield from json_value(text, text.argue))


_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def sections(
    outer: tuple[str, str], inner: tuple[str, str], read_call: Callable[[Incoming], Reading[bool]], extra: str = BLANK
) -> Callable[[Incoming], Reading[None]]:
    """Return the reader of calls between `inner` markers, all of them between `outer` ones, which may be missing.
    `extra`: characters that may stand behind a call."""

    def read(text: Incoming) -> Reading[None]:
        while (yield from text.until((outer[0], inner[0]), text.say)):
            text.keep()
            yield from text.starts(outer[0])
            yield from text.skip()
            called = False
            while (yield from text.starts(inner[0])):
                called = True
                complete = yield from read_call(text)
                text.settle(call=complete)
                text.keep()
                if not complete:
                    break
                yield from text.skip(extra)
                yield from text.starts(inner[1])
                yield from text.skip()
            yield from text.starts(outer[1])
            if called:
                text.forget()
            else:
                text.settle(call=False)

    return read


def _deepseek_call(text: Incoming) -> Reading[bool]:
    """Read a call of V3, `function<sep>name` and fenced JSON, or of V3.1, `name<sep>{...}`."""
    before: list[str] = []
    if not (yield from text.until((_SEP, _END_CALL), before.append)) or not (yield from text.starts(_SEP)):
        return False
    name = "".join(before).strip()
    yield from text.skip()
    if (yield from text.peek()) != "{":
        named: list[str] = []
        if not (yield from text.until(("\n", "```", _END_CALL), named.append)):
            return False
        name = "".join(named).strip()
        yield from text.skip()
        yield from text.starts("```json", "```")
        yield from text.skip()
    if not name or (yield from text.peek()) != "{":
        return False
    text.begin(name)
    return (yield from json_value(text, text.argue))


_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _kimi_call(text: Incoming) -> Reading[bool]:
    """Read a call of Kimi K2, which is `functions.name:0`, the id, and JSON."""
    before: list[str] = []
    _, argue, end = _KIMI_CALL
    if (yield from text.until((argue, end), before.append)) != argue:
        return False
    text.take(len(argue))
    yield from text.skip()
    call_id = "".join(before).strip()
    name = _KIMI_NAME.fullmatch(call_id)
    if name is None or (yield from text.peek()) != "{":
        return False
    text.begin(name[1], call_id)
    return (yield from json_value(text, text.argue))


_LLAMA3 = ("<|python_tag|>",)
_TOOL = ("<tool_call>", "</tool_call>")
HERMES = Format(_TOOL, between(*_TOOL), signs=_TOOL[:1])
LLAMA3_JSON = Format(_LLAMA3, leading(_LLAMA3, (), "{"), signs=('"parameters"',), sure=1)
MISTRAL = Format(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _mistral, signs=("[TOOL_CALLS]",), new_id=short_id)
_DEEPSEEK = sections((_CALLS, _END_CALLS), (_CALL, _END_CALL), _deepseek_call, BLANK + "`")
DEEPSEEK = Format((_CALLS, _END_CALLS, _CALL, _END_CALL, _SEP), _DEEPSEEK, signs=(_SEP,))
GRANITE = Format(
    ("<|tool_call|>", *_TOOL),
    leading(("<|tool_call|>", "<tool_call>"), ("</tool_call>",), "["),
    signs=("<|start_of_role|>", "<|tool_call|>"),
    sure=3,
)
PHI4_MINI = Format(
    ("<|tool_call|>", "<|/tool_call|>"),
    leading(("functools", "<|tool_call|>"), ("<|/tool_call|>", "</|tool_call|>"), "["),
    signs=("<|tool|>", "<|/tool|>"),
)
QWEN3_CODER = Format(_TOOL, function_parameters(*_TOOL), signs=("<tool_call>", "<function=", "<parameter="), sure=3)
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
SEED_OSS = Format(_SEED, function_parameters(*_SEED), signs=("<seed:tool_call>", "<function="), sure=3)
GLM45 = Format(_TOOL, argument_pairs(*_TOOL), signs=("<tool_call>", "<arg_key>", "<arg_value>"), sure=3)
_LLAMA4 = ("<|python_start|>", "<|python_end|>")
LLAMA4_PYTHONIC = Format(_LLAMA4, python_calls(*_LLAMA4))
_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2 = Format(_LFM2, python_calls(*_LFM2), signs=_LFM2[:1])
OPENAI = Format(harmony.MARKERS, harmony.read_calls, signs=("<|channel|>commentary",))
KIMI_K2 = Format((*_KIMI, *_KIMI_CALL), sections(_KIMI, _KIMI_CALL[::2], _kimi_call), signs=(_KIMI[0],))
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
MINIMAX_M2 = Format(_MINIMAX, function_parameters(*_MINIMAX, INVOKE), signs=(_MINIMAX[0], "<invoke name="), sure=3)
_TOOL_CALLS = ("<tool_calls>", "</tool_calls>")
TOOL_CALLS = Format(_TOOL_CALLS, between(*_TOOL_CALLS), signs=_TOOL_CALLS[:1])
_INTERNLM = ("<|action_start|><|plugin|>", "<|action_end|>")
INTERNLM = Format(
    ("<|action_start|>", "<|plugin|>", "<|action_end|>"), between(*_INTERNLM), signs=("<|action_start|>",)
)
