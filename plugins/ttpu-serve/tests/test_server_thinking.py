"""How long a model thinks is told to its chat template, and what it thought before is, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from fake_core import tokenizer
from pydantic import ValidationError

from ttpu_core.errors import RequestError
from ttpu_serve.server.chat_protocol import ChatRequest, Message, TokenizeRequest
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.template import ChatTemplate, as_turn, read_template
from ttpu_serve.server.thinking import options_of, thinking_variables
from ttpu_serve.server.tokens import Tokens

GPT_OSS, QWEN3, SEED = frozenset({"reasoning_effort"}), frozenset({"enable_thinking"}), frozenset({"thinking_budget"})


@pytest.mark.parametrize(
    ("known", "effort", "budget", "expected"),
    [
        (GPT_OSS, "high", None, {"reasoning_effort": "high"}),
        (GPT_OSS, "none", None, {"reasoning_effort": "none"}),
        (QWEN3, "none", None, {"enable_thinking": False}),
        (QWEN3, "low", None, {"enable_thinking": True}),
        (GPT_OSS | QWEN3, "low", None, {"reasoning_effort": "low", "enable_thinking": True}),
        (GPT_OSS | QWEN3, "none", None, {"enable_thinking": False}),
        (frozenset(), "none", None, {}),
        (SEED, None, 512, {"thinking_budget": 512}),
        (SEED, None, None, {}),
    ],
)
def test_effort_and_budget_are_variables_of_the_template(
    known: frozenset[str], effort: str | None, budget: int | None, expected: dict[str, Any]
) -> None:
    assert thinking_variables(known, effort, budget) == expected


@pytest.mark.parametrize(("effort", "budget", "param"), [("low", None, "effort"), (None, 9, "token_budget")])
def test_what_the_template_cannot_be_told_is_refused(effort: str | None, budget: int | None, param: str) -> None:
    with pytest.raises(ApiError, match=f"{param}' is .* has none of the variables"):
        thinking_variables(frozenset({"messages"}), effort, budget)


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        ("{% if enable_thinking is false %}{% endif %}", True),
        ("{% if not enable_thinking is defined %}{% set enable_thinking = false %}{% endif %}", True),
        ("{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}", True),
        ("{% if messages %}{% set enable_thinking = messages %}{% endif %}{{ enable_thinking }}", False),
        ("{{ message.enable_thinking }} enable_thinking {% generation %}{% endgeneration %}", False),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", True),
        ("{{ enable_thinking", False),
    ],
)  # fmt: skip
def test_variables_that_a_template_takes_are_told_from_its_own(template: str, taken: bool) -> None:
    assert ("enable_thinking" in options_of(template)) == taken


def template_of(tmp_path: Path, model: str) -> ChatTemplate:
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl, which ships the templates of published models, is not installed")
    text = (Path(trl.origin).parent / "chat_templates" / f"{model}.jinja").read_text()
    return ChatTemplate(Tokens(tokenizer(tmp_path / "bytes", text)))


def prompt_of(template: ChatTemplate, *messages: Any, **more: Any) -> str:
    asked = [{"role": "user", "content": "Hi"}, *messages]
    return template.render(ChatRequest.model_validate({"model": "m", "messages": asked, **more}))


CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "rain"}


def test_qwen3_is_told_to_think_or_not(tmp_path: Path) -> None:
    template = template_of(tmp_path, "qwen3")
    assert prompt_of(template).endswith("assistant\n")
    for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert prompt_of(template, **more).endswith("<think>\n\n</think>\n\n")
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(template, **both).endswith("assistant\n")  # what is said in so many words holds


def test_a_template_has_defaults_that_requests_change(bytes_tokenizer: Any) -> None:
    text = "{{ enable_thinking }} {{ tone }} {{ messages[0].content }}"
    template = ChatTemplate(Tokens(bytes_tokenizer), text, {"enable_thinking": False, "tone": "dry"})
    assert prompt_of(template) == "False dry Hi"
    assert prompt_of(template, reasoning_effort="high").startswith("True dry")
    assert prompt_of(template, chat_template_kwargs={"tone": "warm"}) == "False warm Hi"
    tokenized = TokenizeRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    assert template.render(tokenized) == "False dry Hi"


def test_gpt_oss_is_told_its_effort_and_what_it_thought(tmp_path: Path) -> None:
    template = template_of(tmp_path, "gptoss")
    assert "Reasoning: low" in prompt_of(template, reasoning_effort="low")
    for name in ("reasoning", "reasoning_content"):
        call: Any = {"role": "assistant", "content": None, "tool_calls": [CALL], name: "I look."}
        prompt = prompt_of(template, call, RESULT)
        assert "analysis<|message|>I look.<|end|>" in prompt and "to=functions.weather" in prompt
        assert "Now I look." in prompt_of(template, {**call, "content": "Now I look."}, RESULT)


def test_qwen3_is_told_what_it_thought_before_a_call(tmp_path: Path) -> None:
    call: Any = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look."}
    assert "<think>\nI look.\n</think>" in prompt_of(template_of(tmp_path, "qwen3"), call, RESULT)


def test_a_template_that_refuses_arguments_as_values_gets_them_as_text(tmp_path: Path) -> None:
    call: Any = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    prompt = prompt_of(template_of(tmp_path, "deepseekv3"), call, RESULT)
    assert "I look.<｜tool▁calls" in prompt and '<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```' in prompt


def test_a_template_that_refuses_arguments_in_both_forms_says_why(tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% endfor %}"
    template = ChatTemplate(Tokens(tokenizer(tmp_path / "bytes", refuses)))
    with pytest.raises(ApiError, match="no calls"):
        prompt_of(template, {"role": "assistant", "content": None, "tool_calls": [CALL]})


def test_reasoning_belongs_to_replies_alone() -> None:
    reply = Message.model_validate({"role": "assistant", "reasoning": "Hm"})
    assert as_turn(reply) == {
        "role": "assistant", "content": "", "reasoning_content": "Hm", "reasoning": "Hm", "thinking": "Hm",
    }  # fmt: skip
    with pytest.raises(ValidationError, match="role user has reasoning"):
        Message.model_validate({"role": "user", "content": "Hi", "reasoning": "Hm"})
    with pytest.raises(ValidationError, match="role user needs content"):
        Message.model_validate({"role": "user"})


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"sch\xf6n")
    (tmp_path / "good").write_text("schön", encoding="utf-8")
    assert read_template(str(tmp_path / "good")) == "schön" and read_template("{{ messages }}") == "{{ messages }}"
    for name in ("latin", "nothing", "."):
        with pytest.raises(RequestError, match="cannot be read"):
            read_template(str(tmp_path / name))


def test_a_marker_is_named_in_grammars_where_it_is_a_special_token(tmp_path: Path) -> None:
    bytewise = tokenizer(tmp_path)
    tokens = Tokens(bytewise)
    assert tokens.terminal(bytewise.convert_ids_to_tokens(257)) == "<[257]>"
    assert tokens.terminal('<"think">') == '"<\\"think\\">"'
