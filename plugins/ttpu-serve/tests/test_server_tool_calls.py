"""Tool calls within text: the same calls however the text is cut into pieces, and no text lost that is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttpu_core.errors import RequestError
from ttpu_serve.entry_points import loaded
from ttpu_serve.guided.matchers import InlineMatchers, Vocabulary
from ttpu_serve.server.chat_protocol import Tool
from ttpu_serve.server.forced_calls import forced_calls
from ttpu_serve.tool_parsers.installed import GROUP, parser_for
from ttpu_serve.tool_parsers.json_calls import Until, read_calls
from ttpu_serve.tool_parsers.protocol import Call

HERMES, LLAMA3, MISTRAL = FORMATS = ("hermes", "llama3_json", "mistral")
ARGUMENTS = {"city": "Łódź", "days": [1, 2], "note": 'a "quoted" </b> { brace'}
ONE = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
LLAMA = json.dumps({"name": "weather", "parameters": ARGUMENTS})
CASES: dict[str, list[tuple[str, str, int]]] = {
    HERMES: [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", 1),
        (f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "Let me see.\n", 2),
        (f"<tool_call>\n{ONE}", "", 1),
        ("2 < 3 and <tool_cal", "2 < 3 and <tool_cal", 0),
        ("<tool_call>nonsense</tool_call> after", "<tool_call>nonsense</tool_call> after", 0),
        ("just words", "just words", 0),
    ],
    LLAMA3: [
        (LLAMA, "", 1),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        (f" \n{LLAMA}", "", 1),
        ('{"name": 3}', '{"name": 3}', 0),
        ("{ not json", "{ not json", 0),
        ("words {}", "words {}", 0),
    ],
    MISTRAL: [
        (f"[TOOL_CALLS][{ONE}, {ONE}]", "", 2),
        (f"[TOOL_CALLS] [{ONE}]", "", 1),
        (f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}", "", 1),
        (f"Well. [TOOL_CALLS]weather{json.dumps(ARGUMENTS)}", "Well. ", 1),
        ("[TOOL_CALLS]oops", "[TOOL_CALLS]oops", 0),
        ("[TOOL", "[TOOL", 0),
    ],
}


def read(name: str, pieces: list[str]) -> tuple[str, list[Call]]:
    reading = loaded(GROUP, name).stream()
    said = [*(reading.push(piece) for piece in pieces), reading.finish()]
    return "".join(one.content for one in said), [call for one in said for call in one.calls]


def test_what_was_searched_for_a_marker_is_not_searched_again() -> None:
    held = Until(("<end>", "</end>"))
    for _ in range(1000):
        assert held.push("words ") is None and len(held.last) <= len("words </end")
    assert held.push("more </e") is None
    at = held.push("nd> after")
    assert at is not None and held.split(at) == ("words " * 1000 + "more ", "</end> after")


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_calls_do_not_depend_on_how_text_is_cut(name: str, data: Any) -> None:
    text, content, count = data.draw(st.sampled_from(CASES[name]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, calls = read(name, pieces)
    assert (said, len(calls)) == (content, count)
    assert all(call.name == "weather" and json.loads(call.arguments) == ARGUMENTS for call in calls)
    assert len({call.id for call in calls}) == count


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.text(alphabet="<>tool_ca[TL]{}\"':, \n", max_size=12), max_size=8))
@settings(max_examples=100, deadline=None)
def test_text_that_is_no_call_is_never_lost(name: str, pieces: list[str]) -> None:
    said, calls = read(name, pieces)
    assert calls or said == "".join(pieces)


def test_what_is_certain_is_said_at_once() -> None:
    reading = loaded(GROUP, HERMES).stream()
    assert reading.push("Let me ").content == "Let me "
    assert reading.push("see <tool").content == "see "
    assert reading.push("box").content == "<toolbox"


def test_mistrals_ids_are_nine_letters() -> None:
    _, calls = read(MISTRAL, [f"[TOOL_CALLS][{ONE}]"])
    assert len(calls[0].id) == 9 and calls[0].id.isalnum()


@pytest.mark.parametrize("text", ["", "3", "[]", '{"name": ""}', '{"name": "a"} trailing', "[" * 100_000])
def test_what_is_no_list_of_calls_is_none(text: str) -> None:
    assert read_calls(text) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("… <tool_call> …", HERMES),
        ("… [TOOL_CALLS] …", MISTRAL),
        ('… {"name": …, "parameters": …}', LLAMA3),
        ('<tool_call>{"name": …, "parameters": …}', HERMES),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_chat_template_shows_the_format(template: str | None, expected: str | None) -> None:
    assert parser_for("auto", template) is (None if expected is None else loaded(GROUP, expected))
    assert parser_for(HERMES, template) is loaded(GROUP, HERMES)
    with pytest.raises(RequestError, match="hermes"):
        parser_for("wizard", template)


TREE = {
    "type": "object", "properties": {"a": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "valid", "invalid"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}, {"x": 1}, {"x": "1"}),
        (TREE, {"a": 1, "kids": [{"a": 2}]}, {"a": 1, "kids": [{"name": "f", "parameters": {"a": 1}}]}),
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "1"}),
        ({"properties": {"a": {"const": {"$ref": "#/$defs/X"}}}}, {"a": {"$ref": "#/$defs/X"}}, {"a": {"$ref": "X"}}),
    ],
    ids=["definitions", "itself", "a property", "a constant"],
)
def test_forced_calls_keep_what_a_tools_references_mean(parameters: Any, valid: Any, invalid: Any) -> None:
    """Beside another tool with a definition of the same name."""
    pytest.importorskip("llguidance")
    other = {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": each}})
        for name, each in (("other", other), ("f", parameters))
    ]
    start = InlineMatchers(Vocabulary([bytes([value]) for value in range(256)] + [b""] * 32, [], [256])).start(
        forced_calls(tools, most=2)
    )
    for arguments, matches in ((valid, True), (invalid, False)):
        matcher = start.deep_copy()
        text = json.dumps([{"name": "f", "parameters": arguments}]).encode()
        assert (matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()) == matches
