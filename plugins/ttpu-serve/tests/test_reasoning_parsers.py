"""Reasoning within text is told apart from content, for every parser, however the text comes in pieces."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import running

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_core.registry import Registry
from ttpu_serve.entry_points import loaded, names
from ttpu_serve.guided.grammar import key_of
from ttpu_serve.guided.matchers import InlineMatchers, Vocabulary
from ttpu_serve.reasoning_parsers.installed import GROUP, parser_for
from ttpu_serve.server import ServerSettings
from ttpu_serve.tool_parsers.installed import GROUP as TOOL_GROUP
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, CallEnds, Content

OPEN, CLOSED = "<|assistant|><think>\n", "<|assistant|>\n<think>\n\n</think>\n\n"
HEADER = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
# parser, text, end of the prompt, beginning of the reply, reasoning, content
CASES = [
    ("think", "<think>Hm. 2 < 3</think>\n\nYes.", "", "", "Hm. 2 < 3", "Yes."),
    ("think", " \n<think>Hm</think>Yes <think>", "", "", "Hm", "Yes <think>"),
    ("think", "Yes.", "", "", "", "Yes."),
    ("think", " <thin air", "", "", "", " <thin air"),
    ("think", "<think>cut off </thi", "", "", "cut off </thi", ""),
    ("think", "", "", "", "", ""),
    ("think", "Hm</think>\nYes", OPEN, "", "Hm", "Yes"),
    ("think", "Hm", OPEN, "", "Hm", ""),
    ("think", "<think> is a tag", CLOSED, "", "", "<think> is a tag"),
    ("think", "Yes.", "the user says <think>\n<|assistant|>", "", "", "Yes."),
    ("think", "ght</think>Yes", "", "<think>I thou", "ght", "Yes"),
    ("think", "es.", "", "<think>I thought</think>Y", "", "es."),
    ("think", "es.", OPEN, "Y", "es.", ""),
    ("deepseek_r1", "Hm</think>\n\nYes", "<|assistant|>", "", "Hm", "Yes"),
    ("deepseek_r1", "<think>Hm</think>Yes", "", "", "Hm", "Yes"),
    ("deepseek_r1", "  Hm", "", "", "  Hm", ""),
    ("deepseek_r1", "Yes", CLOSED, "", "", "Yes"),
    ("mistral", "[THINK]Hm[/THINK]Yes", "", "", "Hm", "Yes"),
    ("seed_oss", "<seed:think>Hm</seed:think>Yes", "", "", "Hm", "Yes"),
    ("kimi_k2", "◁think▷Hm◁/think▷Yes", "", "", "Hm", "Yes"),
    ("hunyuan_a13b", "<think>\nHm\n</think>\n<answer>\nYes</answer>", "", "", "\nHm\n", "Yes"),
    ("ernie45", "<think>Hm</think>\n\n<response>\nYes</response>\n", "", "", "Hm", "Yes\n"),
    ("granite", "Here is my thought process: Hm. Here's my response: Yes", "", "", " Hm. ", " Yes"),
    ("granite", "<think>Hm</think><response>Yes</response>", "", "", "Hm", "Yes"),
    ("granite", "Here is my cat.", "", "", "", "Here is my cat."),
    ("gpt_oss", f"<|channel|>analysis<|message|>Hm{NEXT}<|channel|>final<|message|>Yes", "", "", "Hm", "Yes"),
    ("gpt_oss", "<|channel|>analysis<|message|>Hm", "", "", "Hm", ""),
    ("gpt_oss", "<|channel|>ana", "", "", "", ""),
    ("gpt_oss", f" to=functions.f{HEADER}{{}}", "", "", "", f" to=functions.f{HEADER}{{}}"),
    ("gpt_oss", "plain", "", "", "", "plain"),
    ("gpt_oss", f"<|channel|>analysis<|message|>Hm{NEXT}{CALL}", "", "", "Hm", f"<|start|>assistant{CALL}"),
]  # fmt: skip
SAME = {
    "deepseek_v3": "think", "glm45": "think", "minimax_m2": "deepseek_r1", "olmo3": "think", "qwen3": "think",
    "openai_gptoss": "gpt_oss", "step3": "deepseek_r1",
}  # fmt: skip


def test_every_parser_is_tested() -> None:
    assert {*names(GROUP)} == {case[0] for case in CASES} | {*SAME}
    assert all(loaded(GROUP, alias) == loaded(GROUP, name) for alias, name in SAME.items() if name != "think")


def parted(name: str, text: str, cuts: list[int], prompt: str, continued: str) -> tuple[str, str]:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    stream = loaded(GROUP, name).stream(prompt, continued)
    pieces = [stream.push(text[start:end]) for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    pieces.append(stream.finish())
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


@pytest.mark.parametrize(("name", "text", "prompt", "continued", "reasoning", "content"), CASES)
def test_reasoning_is_told_from_content(
    name: str, text: str, prompt: str, continued: str, reasoning: str, content: str
) -> None:
    assert parted(name, text, [], prompt, continued) == (reasoning, content)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 120), max_size=6))
@settings(max_examples=150, deadline=None)
def test_reasoning_does_not_depend_on_how_text_is_cut(case: Any, cuts: list[int]) -> None:
    name, text, prompt, continued, reasoning, content = case
    assert parted(name, text, cuts, prompt, continued) == (reasoning, content)


def test_reasoning_is_told_as_it_comes() -> None:
    stream = loaded(GROUP, "think").stream("", "")
    assert stream.push("<think>a </th") == ("a ", "")
    assert stream.push("ree") == ("</three", "")
    assert stream.push("</think>b") == ("", "b")


def test_calls_of_gpt_oss_pass_from_one_parser_to_the_other() -> None:
    text = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{CALL}"
    stream, calls = loaded(GROUP, "gpt_oss").stream("", ""), loaded(TOOL_GROUP, "openai").stream({})
    events = [event for letter in text for event in calls.push(stream.push(letter)[1])]
    events += [*calls.push(stream.finish()[1]), *calls.finish()]
    assert [type(event) for event in events if not isinstance(event, Arguments)] == [CallBegins, CallEnds]
    assert "".join(event.text for event in events if isinstance(event, Arguments | Content)) == '{"a": 1}'


def test_a_parser_that_is_not_installed_or_excluded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="'wizard' was asked for, but there are auto, none, deepseek_r1"):
        parser_for("wizard", None)
    monkeypatch.setenv("TTPU_DISABLE_PLUGINS", f"{GROUP}:think")
    registry = Registry()
    monkeypatch.setattr("ttpu_serve.entry_points.default_registry", lambda: registry)
    with pytest.raises(RequestError, match=r"the reasoning parser 'think' .* disabled: excluded by TTPU_DISABLE_PLUGI"):
        parser_for("think", None)
    assert parser_for("none", "<think></think>") is None and parser_for("auto", None) is None


REAL = {
    "qwen3": "think", "qwen3_6": "think", "deepseek_r1_distill": "think", "gptoss": "gpt_oss", "glm4moe": "think",
    "qwen2_5": None, "llama3_1": None, "gemma3": None, "qwen3_instruct_2507": None,
}  # fmt: skip


@pytest.mark.parametrize(("model", "parser"), REAL.items())
def test_a_models_own_template_shows_the_format(model: str, parser: str | None) -> None:
    """The templates are those of published models, which trl ships."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    template = (Path(trl.origin).parent / "chat_templates" / f"{model}.jinja").read_text()
    assert parser_for("auto", template) is (None if parser is None else loaded(GROUP, parser))


TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)  # fmt: skip


def user(text: str) -> Any:
    return {"model": "fake", "messages": [{"role": "user", "content": text}]}


def test_the_chat_endpoint_tells_reasoning_apart(tmp_path: Path) -> None:
    tokenizer = fake_core.tokenizer(tmp_path / "bytes", TEMPLATE)
    asked = user("say: <think>Hm.</think>\\nYes")
    with running(fake_core.FakeCore(tokenizer)) as server:
        message = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "\\nYes")
        assert message["reasoning"] == message["reasoning_content"]
        chunks = list(server.client().chat.completions.create(stream=True, **asked))
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(delta.get(name) or "" for delta in deltas) == "Hm."
        assert "".join(delta.get("content") or "" for delta in deltas) == "\\nYes"
    with running(fake_core.FakeCore(tokenizer), ServerSettings(reasoning_parser="none")) as server:
        message = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert message["content"] == "<think>Hm.</think>\\nYes" and "reasoning_content" not in message


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_reasoning_can_be_left_out_of_the_answer(tmp_path: Path) -> None:
    core = fake_core.FakeCore(fake_core.tokenizer(tmp_path / "bytes", TEMPLATE))
    with running(core) as server:
        asked = user("say: <think>Hm.</think>Yes") | {"include_reasoning": False}
        message = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert message["content"] == "Yes" and "reasoning_content" not in message
        lines = server.http().post("/v1/chat/completions", json=asked | {"stream": True}).text
        said = "".join(re.findall('"content":"([^"]*)"', lines))  # a server joins deltas of a slow reader
        assert "reasoning" not in lines and said == "Yes"


def test_the_end_of_the_prompt_says_whether_a_reply_begins_with_reasoning(tmp_path: Path) -> None:
    core = fake_core.FakeCore(fake_core.tokenizer(tmp_path / "bytes", TEMPLATE))
    with running(core) as server:
        for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            told = server.http().post("/v1/chat/completions", json=user("say: <think>Hm.</think>Yes") | more).json()
            assert told["choices"][0]["message"]["content"] == "<think>Hm.</think>Yes"
        messages = [*user("say: ought</think>Yes")["messages"], {"role": "assistant", "content": "<think>I th"}]
        more = {"continue_final_message": True, "messages": messages}
        (choice,) = server.http().post("/v1/chat/completions", json=user("") | more).json()["choices"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("ought", "Yes")


@pytest.mark.parametrize(
    ("special", "more", "skipped"),
    [
        ("</think>", {}, False),
        ("<tool_call>", {}, True),
        ("<tool_call>", {"tools": TOOLS}, False),
        ("<tool_call>", {"tools": TOOLS, "skip_special_tokens": True}, True),
    ],
)
def test_markers_that_are_special_tokens_reach_the_parsers(
    tmp_path: Path, special: str, more: Any, skipped: bool
) -> None:
    tokenizer = fake_core.tokenizer(tmp_path / "bytes", TEMPLATE + "{# tools: <tool_call> #}")
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    with running(core := fake_core.FakeCore(tokenizer)) as server:
        server.http().post("/v1/chat/completions", json=user("say: hi") | more)
    assert core.seen[-1].skip_special_tokens == skipped


# -- before a prescribed form ---------------------------------------------------------------------------------------

SPECIAL = ["<eos>", "<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]


def accepts(guided: GuidedDecoding, text: str) -> bool:
    """Whether a text of bytes and special tokens is one that a guide allows as a whole."""
    tokens = [bytes([value]) for value in range(256)] + [name.encode() for name in SPECIAL] + [b""] * 24
    matcher = InlineMatchers(Vocabulary(tokens, range(256, 256 + len(SPECIAL)), [256])).start(guided)
    ids = [
        token
        for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        for token in ([256 + SPECIAL.index(part)] if part in SPECIAL else part.encode())
    ]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def terminal(text: str) -> str:
    return f"<[{256 + SPECIAL.index(text)}]>" if text in SPECIAL else f'"{text}"'


@pytest.mark.parametrize(
    ("name", "prompt", "allowed", "refused"),
    [
        ("think", "", ["<think>Hm {</think>\n\n{A}", "{A}"], ["Hm</think>{A}", "<think>Hm{A}"]),
        ("think", OPEN, ["Hm</think>{A}", "</think>\n{A}"], ["{A}", "<think>Hm</think>{A}"]),
        ("deepseek_r1", "", ["Hm</think>{A}", "<think>Hm</think>{A}"], ["{A}"]),
        ("mistral", "", ["[THINK]a / b[/THINK]{A}", "{A}"], ["[THINK]Hm{A}"]),
        ("granite", "", ["Here is my thought process: Hm Here's my response:{A}", "{A}"], ["Hm{A}"]),
        ("gpt_oss", "", [f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{HEADER}{{A}}", HEADER + "{A}",
         "<|channel|>final <|constrain|>json<|message|>{A}"], ["{A}", "<|channel|>analysis<|message|>{A}"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("guided", "answer"),
    [(GuidedDecoding(json={"type": "object"}), '{"a": 1}'), (GuidedDecoding(regex="[a-c]+"), "abc"),
     (GuidedDecoding(choice=("yes", "no")), "yes")],
)  # fmt: skip
def test_reasoning_may_come_before_a_prescribed_form(
    name: str, prompt: str, allowed: list[str], refused: list[str], guided: GuidedDecoding, answer: str
) -> None:
    parser = loaded(GROUP, name)
    guided = replace(guided, prelude=parser.prelude(prompt, "", terminal))
    for text in allowed:
        written = text.replace("{A}", answer)
        assert accepts(guided, written), written
        stream = parser.stream(prompt, "")
        assert (stream.push(written)[1] + stream.finish()[1]).strip() == answer
        assert not accepts(guided, written + "!")
    for text in refused:
        assert not accepts(guided, text.replace("{A}", answer)), text


def test_guides_of_other_preludes_are_other_guides() -> None:
    preludes = (None, "start: answer", "start: answer answer")
    assert len({key_of(GuidedDecoding(regex="a", prelude=prelude)) for prelude in preludes}) == 3


def test_no_reasoning_comes_after_it_was_closed_or_without_its_tokens() -> None:
    assert loaded(GROUP, "think").prelude(CLOSED, "", terminal) is None
    assert loaded(GROUP, "gpt_oss").prelude("", "", lambda text: f'"{text}"') is None
    with pytest.raises(RequestError, match="only json, regex and choice"):
        GuidedDecoding(grammar="start: /a/", prelude="start: answer")


def test_a_request_that_prescribes_a_form_lets_the_model_reason_before(tmp_path: Path) -> None:
    tokenizer = fake_core.tokenizer(tmp_path / "bytes", TEMPLATE + "{# tools #}")
    with running(core := fake_core.FakeCore(tokenizer)) as server:
        for more in (
            {"response_format": {"type": "json_object"}},
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ):
            told = server.http().post("/v1/chat/completions", json=user("hi") | more).json()
            assert "thought" in core.seen[-1].guided.prelude and told["choices"][0]["message"]["reasoning"] is None
            server.http().post("/v1/chat/completions", json=user("hi") | more | {"reasoning_effort": "none"})
            assert core.seen[-1].guided.prelude is None
        own = server.http().post("/v1/chat/completions", json=user("hi") | {"guided_grammar": 'start: "a"'})
        assert own.status_code == 200 and core.seen[-1].guided.prelude is None
    with running(fake_core.FakeCore(tokenizer), ServerSettings(reasoning_parser="gpt_oss")) as server:
        asked = user("hi") | {"guided_choice": [HEADER]}  # of which the tokenizer has no tokens
        told = server.http().post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        assert told["content"] == HEADER and "reasoning" not in told
