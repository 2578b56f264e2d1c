"""One reply of a chat, token by token: what each delta adds, and the reply as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.entry_points import loaded
from ttpu_serve.reasoning_parsers.installed import GROUP as REASONING
from ttpu_serve.server.turn import New, Turn
from ttpu_serve.tool_parsers.installed import GROUP
from ttpu_serve.tool_parsers.json_calls import forced_stream
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, new_id

ARGUMENTS = '{"city": "Oslo"}'
CALLED = CallBegins("weather", "call_1")
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


def hermes() -> Any:
    return loaded(GROUP, "hermes").stream({})


def read(turn: Turn, text: str, reason: str = "stop") -> list[New]:
    """Read a text letter by letter."""
    deltas = [OutputDelta("r", 0, letter, [0], None, None) for letter in text]
    return [turn.read(delta) for delta in [*deltas, OutputDelta("r", 0, "", [0], None, reason)]]


MODES = {
    "auto": (lambda: Turn(hermes()), f"<tool_call>{CALL}</tool_call>", "tool_calls"),
    "required": (lambda: Turn(forced_stream({}, new_id)), f"[{CALL}]", "tool_calls"),
    "named": (lambda: Turn(named=CALLED), ARGUMENTS, "stop"),
}


@pytest.mark.parametrize("mode", sorted(MODES))
def test_each_letter_of_the_arguments_is_told_when_it_comes(mode: str) -> None:
    make, text, reason = MODES[mode]
    turn = make()
    news = read(turn, text)
    begun = [event for new in news for event in new.events if isinstance(event, CallBegins)]
    assert [event.name for event in begun] == ["weather"]
    pieces = [event.text for new in news for event in new.events if isinstance(event, Arguments)]
    assert pieces == [*ARGUMENTS]
    assert [(call.name, call.id, call.arguments) for call in turn.calls] == [("weather", begun[0].id, ARGUMENTS)]
    assert (turn.text, turn.ended_by("stop"), turn.ended_by("length")) == ("", reason, "length")


def test_a_named_call_begins_after_the_reasoning_before_it() -> None:
    def turn() -> Turn:
        return Turn(named=CALLED, reasoning_parser=loaded(REASONING, "think").stream("<think>", ""))

    news = read(turn(), f"Hm</think>{ARGUMENTS}")
    assert not any(new.events for new in news[:10]) and news[10].events == [CALLED, Arguments("{")]
    read(cut := turn(), "Hm", "length")
    assert (cut.calls, cut.text, cut.reasoning) == ([], "", "Hm")


def test_calls_beyond_the_maximum_are_left_out_and_content_is_not() -> None:
    turn = Turn(hermes(), most=1)
    read(turn, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> Done")
    assert [json.loads(call.arguments) for call in turn.calls] == [{"city": "Oslo"}] and turn.text == " Done"


def test_a_call_that_breaks_beyond_the_maximum_takes_no_other_away() -> None:
    turn = Turn(hermes(), most=1)
    read(turn, f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "weather", "arguments": {{"ci', "length")
    assert len(turn.calls) == 1 and turn.calls[0].arguments == ARGUMENTS


def test_a_call_that_breaks_does_not_count_towards_the_maximum() -> None:
    turn = Turn(hermes(), most=1)
    broken = CALL.replace('"Oslo"', "Oslo")
    news = read(turn, f"<tool_call>{broken}</tool_call><tool_call>{CALL}</tool_call>")
    assert [call.arguments for call in turn.calls] == [ARGUMENTS]
    assert sum(isinstance(event, CallBegins) for new in news for event in new.events) == 2


def test_a_call_that_breaks_is_text_and_the_reply_ends_as_one_without_calls() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"ci'
    turn = Turn(hermes())
    read(turn, text)
    assert (turn.calls, turn.text, turn.ended_by("stop")) == ([], text, "stop")


def test_calls_follow_reasoning_which_may_speak_of_calls() -> None:
    turn = Turn(hermes(), reasoning_parser=loaded(REASONING, "think").stream("", ""))
    read(turn, f"<think>Perhaps <tool_call>{CALL}</tool_call>?</think>\n\n<tool_call>{CALL}</tool_call>")
    assert turn.reasoning == f"Perhaps <tool_call>{CALL}</tool_call>?"
    assert len(turn.calls) == 1 and turn.text == ""


def test_what_a_reasoning_parser_held_back_comes_at_the_end() -> None:
    for text, reasoning, content in (("<think>hm</thi", "hm</thi", ""), ("Yes <thi", "", "Yes <thi")):
        turn = Turn(reasoning_parser=loaded(REASONING, "think").stream("", ""))
        read(turn, text, "length")
        assert (turn.reasoning, turn.text) == (reasoning, content)


class Broken:
    """A stranger's parser."""

    def push(self, text: str) -> Any:
        raise ZeroDivisionError(text)

    finish = push


def test_a_parser_that_fails_costs_an_answer_its_form_and_not_itself() -> None:
    for turn in (Turn(Broken()), Turn(reasoning_parser=Broken())):  # type: ignore[arg-type]
        read(turn, "Yes <b>")
        assert (turn.text, turn.reasoning, turn.calls) == ("Yes <b>", "", [])
