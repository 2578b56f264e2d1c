"""Tool calls within text, for every parser: the same calls however the text is cut into pieces, calls that stream, and
no text lost that is no call."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttpu_core.errors import PluginError, RequestError
from ttpu_core.plugin_records import REASONING_PARSERS
from ttpu_core.registry import Registry
from ttpu_serve.entry_points import loaded, names, surest
from ttpu_serve.tool_parsers.installed import GROUP, check_parser, parser_for
from ttpu_serve.tool_parsers.json_calls import forced_stream
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, CallBreaks, CallEnds, Content, Event, new_id

ARGUMENTS = {"city": "Łódź", "days": [1, 2], "note": 'a "quoted" </b> { brace\nline'}
TOOLS: Any = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "note": {"type": "string"},
            "warm": {"type": "boolean"},
            "wind": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "level": {"enum": [1, 2]},
            "count": {"type": ["integer", "null"]},
        },
    },
    "clock": {},
}
ONE = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
LLAMA = json.dumps({"type": "function", "name": "weather", "parameters": ARGUMENTS}, ensure_ascii=False)
ARGS = json.dumps(ARGUMENTS, ensure_ascii=False)
PYTHON = """weather(city='Łódź', days=[1, 2], note='a "quoted" </b> { brace\\nline')"""
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
    '<parameter=note>\na "quoted" </b> { brace\nline\n</parameter>\n</function>\n</tool_call>'
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>[1, 2]</arg_value>\n<arg_key>note</arg_key>\n<arg_value>a "quoted" </b> { brace\nline</arg_value>\n'
    "</tool_call>"
)
INVOKED = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Łódź</parameter>\n'
    '<parameter name="days">[1, 2]</parameter>\n<parameter name="note">a "quoted" </b> { brace\nline</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
KIMI = f"<|tool_call_begin|>functions.weather:%d<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>"
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGS}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}"
NEXT = "<|call|><|start|>assistant"

# text, its content, number of calls
CASES: dict[str, list[tuple[str, str, int]]] = {
    "hermes": [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", 1),
        (f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "Let me see.\n", 2),
        (f"\n\n<tool_call>\n{ONE}", "", 1),
        (f'<tool_call>{{"arguments": {ARGS}, "name": "weather"}}</tool_call> Done. \n', " Done.", 1),
        (f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGS)}}}</tool_call>', "", 1),
        (f'<tool_call>{{"type": "function", "function": {ONE}}}</tool_call>', "", 1),
        (f"<tool_call>{ONE}</tool_call>\n<tool_call>bad", "\n<tool_call>bad", 1),
        ("\n<tool_call>bad", "\n<tool_call>bad", 0),
        ("<tool_call>" + ONE.replace("\\n", "\n"), "", 1),
        ("2 < 3 and <tool_cal", "2 < 3 and <tool_cal", 0),
        ("<tool_call>nonsense</tool_call> after", "<tool_call>nonsense</tool_call> after", 0),
        ("just words\n", "just words\n", 0),
    ],
    "llama3_json": [
        (LLAMA, "", 1),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        (f" \n{LLAMA}", "", 1),
        ('{"name": 3}', '{"name": 3}', 0),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', 0),
        ("{ not json", "{ not json", 0),
        (" words {}", " words {}", 0),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{ONE}, {ONE}]", "", 2),
        (f"[TOOL_CALLS] [{ONE}]", "", 1),
        (f"[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGS}", "", 2),
        (f"Well. [TOOL_CALLS]weather{ARGS}", "Well. ", 1),
        ("[TOOL_CALLS]oops", "[TOOL_CALLS]oops", 0),
        ("[TOOL", "[TOOL", 0),
    ],
    "llama4_pythonic": [
        (f"[{PYTHON}]", "", 1),
        (f"<|python_start|>[{PYTHON}, {PYTHON}]<|python_end|>", "", 2),
        (f"Hm. <|python_start|>[{PYTHON},]", "Hm. ", 1),
        ("[1, 2] is a list", "[1, 2] is a list", 0),
        ("[other(x=1)]", "[other(x=1)]", 0),
    ],
    "lfm2": [(f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>Checking.", "Checking.", 1)],
    "qwen3_coder": [
        (CODER, "", 1),
        (f"Let me see.\n{CODER}\n{CODER}", "Let me see.\n", 2),
        (CODER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "", 1),
        (CODER.replace("\n</parameter>\n<parameter", "\n<parameter"), "", 1),
        (CODER.replace("line\n</parameter>", "line"), "", 1),
        (CODER.replace("</function>\n", ""), "", 1),
        ("<tool_call>\n<function=", "<tool_call>\n<function=", 0),
        ("a <function b", "a <function b", 0),
    ],
    "seed_oss": [(CODER.replace("tool_call", "seed:tool_call"), "", 1)],
    "glm45": [(GLM, "", 1), (f"So:{GLM}\n{GLM}", "So:", 2), (f"<tool_call>{ONE}", f"<tool_call>{ONE}", 0),
              ("<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", 0)],
    "deepseek_v3": [
        (f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", "", 2),
        (f"Hm.<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>", "Hm.", 2),
        ("<｜tool▁calls▁begin｜>junk", "<｜tool▁calls▁begin｜>junk", 0),
    ],
    "kimi_k2": [
        (f"I look.<|tool_calls_section_begin|>{KIMI % 0}{KIMI % 1}<|tool_calls_section_end|>", "I look.", 2),
        (KIMI % 0, "", 1),
        ("<|tool_calls_section_begin|>junk", "<|tool_calls_section_begin|>junk", 0),
    ],
    "minimax_m2": [(INVOKED, "", 1), (f"I look.\n{INVOKED}", "I look.\n", 1), ("<invoke name=", "<invoke name=", 0)],
    "jamba": [
        (f"<tool_calls>[\n  {ONE},\n  {ONE}\n]</tool_calls>", "", 2),
        (f"<tool_calls>\n{ONE}\n{ONE}\n</tool_calls>", "", 2),
    ],
    "internlm": [(f"I look.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", "I look.", 1)],
    "openai": [
        (f"<|channel|>final<|message|>Yes.{NEXT}{HARMONY}", "Yes.", 1),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY}<|call|>", "I look.", 1),
        (f" to=functions.weather<|channel|>commentary json<|message|>{ARGS}{NEXT}{HARMONY}", "", 2),
        (f"{HARMONY} \n{NEXT}<|channel|>final<|message|>Yes.", "Yes.", 1),
        ("plain words", "plain words", 0),
        ("<|channel|>commentary to=python<|message|>1 + 1", "1 + 1", 0),
    ],
    "granite": [
        (f"<|tool_call|>[{ONE}, {ONE}]", "", 2),
        (f"<tool_call>[{ONE}]", "", 1),
        (f" [{ONE}]", "", 1),
        ('["a list"]', '["a list"]', 0),
    ],
    "phi4_mini": [
        (f"functools[{ONE}, {ONE}]", "", 2),
        (f"Well. <|tool_call|>[{ONE}]<|/tool_call|>", "Well. ", 1),
        ("functools is a module", "functools is a module", 0),
    ],
}
ALIASES = {
    "deepseek_v31": "deepseek_v3", "hunyuan_a13b": "jamba", "minimax": "jamba",
    "llama4_json": "llama3_json", "phi4_mini_json": "phi4_mini",
    "pythonic": "llama4_pythonic", "qwen3_xml": "qwen3_coder",
}  # fmt: skip
TEXTS = [(name, *case) for name, cases in CASES.items() for case in cases]


def events_of(stream: Any, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in stream.push(piece)] + [*stream.finish()]


def read(events: list[Event]) -> tuple[str, list[tuple[str, str, str]]]:
    """The content, and the name, arguments and id of the calls, as a whole answer has them."""
    content, calls, open_call = "", [], None
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallBegins(name, call_id):
                assert open_call is None
                open_call = (name, "", call_id)
            case Arguments(text):
                assert open_call is not None
                open_call = (open_call[0], open_call[1] + text, open_call[2])
            case CallEnds():
                assert open_call is not None
                calls.append(open_call)
                open_call = None
            case CallBreaks(text):
                assert open_call is not None
                content, open_call = content + text, None
    assert open_call is None
    return content, calls


def cut(text: str, data: Any, most: int = 8) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=most)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def whole(name: str, text: str) -> tuple[str, list[tuple[str, str, str]]]:
    return read(events_of(loaded(GROUP, name).stream(TOOLS), [text]))


def test_every_parser_is_tested() -> None:
    assert {*names(GROUP)} == {*CASES, *ALIASES}
    assert all(loaded(GROUP, alias) is loaded(GROUP, name) for alias, name in ALIASES.items())


@pytest.mark.parametrize(("name", "text", "content", "count"), TEXTS)
def test_calls_are_told_from_content(name: str, text: str, content: str, count: int) -> None:
    said, calls = whole(name, text)
    assert (said, len(calls)) == (content, count)
    assert all(called == "weather" and json.loads(arguments) == ARGUMENTS for called, arguments, _ in calls)
    assert len({call_id for _, _, call_id in calls}) == count


@given(case=st.sampled_from(TEXTS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_calls_do_not_depend_on_how_text_is_cut(case: tuple[str, str, str, int], data: Any) -> None:
    name, text, content, count = case
    said, calls = read(events_of(loaded(GROUP, name).stream(TOOLS), cut(text, data)))
    assert (said, len(calls)) == (content, count)
    assert [call[:2] for call in calls] == [call[:2] for call in whole(name, text)[1]]


@given(case=st.sampled_from(TEXTS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_text_that_ends_early_is_calls_that_were_complete_and_content(case: Any, data: Any) -> None:
    name, text = case[:2]
    text = text[: data.draw(st.integers(0, len(text)))]
    said, calls = read(events_of(loaded(GROUP, name).stream(TOOLS), cut(text, data)))
    assert (said, [call[:2] for call in calls]) == (whole(name, text)[0], [call[:2] for call in whole(name, text)[1]])
    assert all(json.loads(arguments) == ARGUMENTS for _, arguments, _ in calls)
    assert calls or name == "openai" or said == text


MARKERS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "weather", "(", ")", "=", "<function=", "<parameter=", ">",
    "</parameter>", "</function>", "{", "}", '"name"', ":", ",", '"weather"', '"arguments"', '"', "\\", "\n", " ", "1",
    "'", "<|python_tag|>", "<|channel|>", "<|message|>", " to=functions.f", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "functools", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<invoke name=\"", "\">",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json",
    "é", "\ud83d",
]  # fmt: skip


@given(name=st.sampled_from(sorted(CASES)), pieces=st.lists(st.sampled_from(MARKERS), max_size=24), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_and_text_that_is_no_call_is_never_lost(name: str, pieces: list[str], data: Any) -> None:
    text = "".join(pieces)
    said, calls = read(events_of(loaded(GROUP, name).stream(TOOLS), pieces))
    again = read(events_of(loaded(GROUP, name).stream(TOOLS), cut(text, data)))
    assert (said, [call[:2] for call in calls]) == (again[0], [call[:2] for call in again[1]])
    for _, arguments, _ in calls:
        json.loads(arguments)
    assert calls or name == "openai" or said == text


@pytest.mark.parametrize("name", sorted(CASES))
def test_arguments_stream_as_they_come(name: str) -> None:
    """Each piece of a long string is told when it comes, but for what may begin a marker."""
    text = next(text for text, _, count in CASES[name] if count).replace("Łódź", "Łódź" * 100)
    head, tail = text.split("Łódź" * 50, 1)
    stream = loaded(GROUP, name).stream(TOOLS)
    events = [*stream.push(head + "Łódź")]
    assert [event.name for event in events if isinstance(event, CallBegins)] == ["weather"]
    for _ in range(49):
        (event,) = stream.push("Łódź")
        assert event == Arguments("Łódź")
    assert any(isinstance(event, CallEnds) for event in [*stream.push(tail), *stream.finish()])


@pytest.mark.parametrize("name", sorted(CASES))
def test_reading_takes_time_in_proportion_to_the_text(name: str) -> None:
    """However much of it comes at once: calls, markers, beginnings of them, halves of calls, and quotes."""
    call = next(text for text, _, count in CASES[name] if count)
    parser = loaded(GROUP, name)
    for part in (call, parser.markers[0], parser.markers[0][:-1], call[: len(call) // 2], "\\n'\"[{("):
        before = time.process_time()
        read(events_of(parser.stream(TOOLS), [call[: len(call) // 2], part * (100_000 // len(part))]))
        assert time.process_time() - before < 2


def test_content_is_told_at_once_but_for_what_may_begin_a_marker() -> None:
    stream = loaded(GROUP, "hermes").stream(TOOLS)
    assert stream.push("Let me ") == [Content("Let me ")]
    assert stream.push("see <tool") == [Content("see ")]
    assert stream.push("box") == [Content("<toolbox")]


def test_a_call_that_ends_early_has_begun_in_a_stream_and_is_content_as_a_whole() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Os'
    events = events_of(loaded(GROUP, "hermes").stream(TOOLS), [text])
    assert isinstance(events[0], CallBegins) and events[1:] == [Arguments('{"city": "Os'), CallBreaks(text)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("<parameter=city>\n5\n</parameter>", {"city": "5"}),
        ("<parameter=warm>\nTrue\n</parameter>", {"warm": True}),
        ("<parameter=warm>maybe</parameter>", {"warm": "maybe"}),
        ("<parameter=wind>null</parameter>", {"wind": None}),
        ("<parameter=wind>3</parameter>", {"wind": 3}),
        ('<parameter=place>{"at": 1}</parameter>', {"place": {"at": 1}}),
        ("<parameter=level>2</parameter>", {"level": 2}),
        ("<parameter=count>2</parameter>", {"count": 2}),
        ("<parameter=count>2.0</parameter>", {"count": 2}),
        ("<parameter=count>2.5</parameter>", {"count": "2.5"}),
        ("<parameter=wind>NaN</parameter>", {"wind": "NaN"}),
        ("<parameter=days>['a', (1,)]</parameter>", {"days": ["a", [1]]}),
        ("<parameter=days>\n" + "[" * 5000 + "\n</parameter>", {"days": "[" * 5000}),
        ("<parameter=unknown>\n\n{}\n\n</parameter>", {"unknown": "\n{}\n"}),
        ("", {}),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(written: str, expected: Any) -> None:
    _, ((_, arguments, _),) = whole("qwen3_coder", f"<tool_call><function=weather>{written}</function></tool_call>")
    assert json.loads(arguments) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r"'a\'b\n\x41\u0142\q'", "a'b\nAł\\q"),
        ('"""a "quoted" word"""', 'a "quoted" word'),
        ("{'a': None, \"b\": (True, -1.5e3, 0xE0, .5)}", {"a": None, "b": [True, -1500.0, 224, 0.5]}),
        ("''", ""),
    ],
)
def test_python_literals_become_json(written: str, expected: Any) -> None:
    _, ((_, arguments, _),) = whole("pythonic", f"[weather(x={written})]")
    assert json.loads(arguments) == {"x": expected}


@pytest.mark.parametrize("written", ["{1}", "1 + 1", "f()", "nan", "1e999", "[" * 100, "'open", "{1: 2}"])
def test_what_is_no_literal_is_no_call(written: str) -> None:
    text = f"[weather(x={written})]"
    assert whole("pythonic", text) == (text, [])


@pytest.mark.parametrize(
    ("written", "expected"), [("", {}), (', "arguments": null', {}), (', "parameters": {"a": [-1.5e3, true]}', None)]
)
def test_arguments_may_be_left_out(written: str, expected: Any) -> None:
    _, ((_, arguments, _),) = whole("hermes", f'<tool_call>{{"name": "clock"{written}}}</tool_call>')
    assert json.loads(arguments) == ({"a": [-1500.0, True]} if expected is None else expected)


@pytest.mark.parametrize(
    "arguments", ['{"a": 1,}', "[1,]", '{"a":}', "{,}", "9" * 5000, "01", "NaN", '{"a" 1}', '"\\x"', "[" * 200]
)
def test_arguments_that_no_client_could_read_are_no_call(arguments: str) -> None:
    arguments += "]" * 200 * arguments.startswith("[[")
    text = f'<tool_call>{{"name": "clock", "arguments": {arguments}}}</tool_call>'
    assert whole("hermes", text) == (text, [])


def test_kimis_ids_are_those_that_it_writes() -> None:
    text = CASES["kimi_k2"][0][0]
    assert [(name, call_id) for name, _, call_id in whole("kimi_k2", text)[1]] == [
        ("weather", "functions.weather:0"), ("weather", "functions.weather:1"),
    ]  # fmt: skip


def test_a_name_is_text_that_can_be_sent() -> None:
    _, ((name, _, _),) = whole("hermes", '<tool_call>{"name": "clock\\ud83d"}</tool_call>')
    assert name.encode() == "clock\ufffd".encode()


def test_mistrals_ids_are_nine_letters() -> None:
    _, calls = whole("mistral", f"[TOOL_CALLS][{ONE}]")
    assert len(calls[0][2]) == 9 and calls[0][2].isalnum()
    _, calls = whole("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGS}")
    assert calls[0][2] == "abcdefghi"
    _, calls = whole("mistral", f"[TOOL_CALLS]weather[CALL_ID]call_1[ARGS]{ARGS}")
    assert len(calls[0][2]) == 9 and calls[0][2].isalnum()


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", '{"function":' * 100_000, '{"name": ""}', "[" * 100_000,
     '[{"name": "f", "parameters": ' + '{"a":' * 100_000],
)  # fmt: skip
def test_a_forced_text_that_is_no_list_of_calls_is_content(text: str) -> None:
    assert read(events_of(forced_stream({}, new_id), [text])) == (text, [])


def test_forced_calls_stream() -> None:
    stream = forced_stream(TOOLS, new_id)
    events = [*stream.push('[{"name": "weather", "parameters": {"city": "Os')]
    assert isinstance(events[0], CallBegins) and events[1:] == [Arguments('{"city": "Os')]
    assert [*stream.push('lo"}}, {"name": "clock"'), *stream.push("}]"), *stream.finish()][:2] == [
        Arguments('lo"}'),
        CallEnds(),
    ]


def test_the_parser_that_the_documentation_writes_works() -> None:
    page = (Path(__file__).parents[3] / "docs/write-a-parser.md").read_text(encoding="utf-8")
    calls, reasoning, its_test = (part.split("```", 1)[0] for part in page.split("```python\n")[1:])
    written: dict[str, Any] = {"Arguments": Arguments}
    exec(calls + reasoning + its_test, written)  # our own text
    written["test_calls_are_read_in_pieces"]()
    assert read(events_of(written["CALLS"].stream({}), ["CALL it a day"])) == ("CALL it a day", [])
    assert written["CALLS"].knows("Write CALL {name} {arguments} END") == 2
    stream = written["THOUGHTS"].stream("", "")
    assert stream.push("<musing>Hm</musing>Yes") == ("Hm", "Yes")


# -- chat templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("… <tool_call> …", "hermes"),
        ("… [TOOL_CALLS] …", "mistral"),
        ('… {"name": …, "parameters": …}', "llama3_json"),
        ('<tool_call>{"name": …, "parameters": …}', "hermes"),
        ("<|start_of_role|> … <|tool_call|>", "granite"),
        ("<|tool|> … <|/tool|>", "phi4_mini"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_chat_template_shows_the_format(template: str | None, expected: str | None) -> None:
    assert parser_for("auto", template) is (None if expected is None else loaded(GROUP, expected))
    assert parser_for("hermes", template) is loaded(GROUP, "hermes")
    with pytest.raises(RequestError, match="hermes"):
        parser_for("wizard", template)


REAL = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_6": "qwen3_coder", "nemotron_3_nano": "qwen3_coder",
    "glm4moe": "glm45", "gptoss": "openai", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "deepseekv3": "deepseek_v3", "phi3": None, "gemma3": None,
}  # fmt: skip


@pytest.mark.parametrize(("model", "parser"), REAL.items())
def test_calls_as_a_models_own_template_writes_them_are_read(model: str, parser: str | None) -> None:
    """The templates are those of published models, which trl ships."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    template = (Path(trl.origin).parent / "chat_templates" / f"{model}.jinja").read_text()
    found = parser_for("auto", template)
    assert found is (None if parser is None else loaded(GROUP, parser))
    if found is None:
        return
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments: Any = {"city": "Łódź", "days": [1, 2], "warm": True}
    given: Any = json.dumps(arguments) if model == "deepseekv3" else arguments
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": given}}
    user = {"role": "user", "content": "Weather?"}
    reply = {"role": "assistant", "content": None if model == "deepseekv3" else "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "weather", "description": "W.", "parameters": TOOLS["weather"]}}]
    shared: Any = {"tools": tools, "chat_template": template, "bos_token": "", "eos_token": ""}
    ((text,), _) = render_jinja_template([[user, reply]], add_generation_prompt=False, **shared)
    ((asked,), _) = render_jinja_template([[user]], add_generation_prompt=True, **shared)
    written = text[len(asked) :] if text.startswith(asked) else text[text.index("Weather?") + 8 :]
    _, calls = read(events_of(found.stream(TOOLS), [written]))
    assert [(name, json.loads(written)) for name, written, _ in calls] == [("weather", arguments)]


def point(name: str, owner: str, load: Any) -> Any:
    """An entry point of a tool parser in the distribution `owner`."""
    dist = SimpleNamespace(metadata={"Name": owner, "Version": "1"}, requires=None)
    return SimpleNamespace(name=name, group=GROUP, value=f"{name}:Parser", dist=dist, load=load)


def test_parsers_of_other_distributions_are_plugins_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that claimed a name one won in silence, and no variable excluded a parser."""

    def fail() -> None:
        raise OSError("no such file")

    sure = SimpleNamespace(knows=lambda template: 1)
    points = [
        point("both", "one", lambda: sure), point("both", "two", lambda: sure), point("torn", "one", fail),
        point("good", "one", lambda: sure), point("bad", "three", lambda: sure),
    ]  # fmt: skip
    monkeypatch.setenv("TTPU_DISABLE_PLUGINS", "three")
    registry = Registry(points)
    monkeypatch.setattr("ttpu_serve.entry_points.default_registry", lambda: registry)
    assert names(GROUP) == ["both", "good", "torn"]
    assert loaded(GROUP, "good") is surest(GROUP, "template") is sure
    for name, why in (
        ("both", "claimed by one and two; choose one by excluding the other"),
        ("torn", "importing 'torn:Parser' failed with OSError: no such file"),
        ("bad", "the tool call parser 'bad' was asked for, but three is disabled: excluded by TTPU_DISABLE_PLUGINS"),
    ):
        with pytest.raises(PluginError, match=why):
            loaded(GROUP, name)


def test_ttpus_own_parser_yields_to_another_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two were in conflict, and the error could advise to exclude the server's distribution."""
    ours, theirs = SimpleNamespace(knows=lambda template: 1), SimpleNamespace(knows=lambda template: 2)
    points = [
        point("hermes", "olive", lambda: theirs), point("hermes", "ttpu-serve", lambda: ours),
        point("both", "one", lambda: theirs), point("both", "ttpu-serve", lambda: ours),
        point("both", "two", lambda: theirs),
    ]  # fmt: skip
    registry = Registry(points)
    monkeypatch.setattr("ttpu_serve.entry_points.default_registry", lambda: registry)
    assert parser_for("hermes", None) is parser_for("auto", "template") is theirs
    [record] = [r for r in registry.plugins(GROUP) if (r.name, r.distribution) == ("hermes", "ttpu-serve")]
    assert (record.state, record.reason) == ("superseded", "olive has a parser of this name.")
    with pytest.raises(PluginError, match=r"the tool call parser .both. was .* claimed by one and two"):
        check_parser("both")
    monkeypatch.setenv("TTPU_DISABLE_PLUGINS", "olive")
    without = Registry(points)
    monkeypatch.setattr("ttpu_serve.entry_points.default_registry", lambda: without)
    assert parser_for("hermes", None) is ours


def test_the_name_of_a_family_excludes_no_parser_and_an_excluded_one_is_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def disabled(text: str) -> set[str]:
        monkeypatch.setenv("TTPU_DISABLE_PLUGINS", text)
        registry = Registry()
        monkeypatch.setattr("ttpu_serve.entry_points.default_registry", lambda: registry)
        groups = (GROUP, REASONING_PARSERS)
        return {r.group for group in groups for r in registry.plugins(group) if r.state == "disabled"}

    assert disabled("mistral,granite,*mistral,ttpu.architectures:*") == set()
    assert disabled("ttpu-serve") == disabled("*:mistral") == {GROUP, REASONING_PARSERS}
    assert disabled(f"{GROUP}:mistral") == {GROUP}
    monkeypatch.setenv("TTPU_PLUGINS", "ttpu-llama,jax,serve")
    assert disabled("") == set()
    monkeypatch.delenv("TTPU_PLUGINS")
    disabled(f"{GROUP}:mistral")
    why = "'mistral' was asked for, but that of ttpu-serve is disabled: excluded by TTPU_DISABLE_PLUGINS. .* auto, deep"
    with pytest.raises(RequestError, match=why):
        check_parser("mistral")
