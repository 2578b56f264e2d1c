"""The assistant's tokens, and no others, have weight."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from data_cases import ASSISTANT, EOS, documents, tokenizer

from ttpu_core.errors import DataError

TALK = [
    {"role": "user", "content": "What is for?"},
    {"role": "assistant", "content": "A loop."},
    {"role": "user", "content": "And while?"},
    {"role": "assistant", "content": "Another — loop.\n"},
]


def training_template(name: str) -> str:
    """A template of TRL with markers around what the assistant says. TRL itself is not imported, which takes long."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}_training.jinja").read_text()


def without_markers(template: str) -> str:
    """The same text: markers trim the white space about them as a condition does."""
    template = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", template)
    return re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", template)


def weighted(template: str | None, **example: Any) -> tuple[list[int], list[int]]:
    [found] = documents([{"messages": TALK, **example}], assistant_only_loss=True, chat_template=template)
    return found.tokens.tolist(), found.weights.tolist()


def test_the_shipped_template_without_markers() -> None:
    tokens, weights = weighted(None)
    assert tokens == tokenizer().apply_chat_template(TALK)["input_ids"]
    trained, inside = [], False
    for token in tokens:
        trained.append(int(inside))
        inside = token == ASSISTANT or (inside and token != EOS)
    assert weights == trained
    assert all(documents([{"messages": TALK}])[0].weights)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_the_mask_is_that_of_transformers_and_the_same_without_markers(name: str) -> None:
    template = training_template(name)
    expected = tokenizer().apply_chat_template(
        TALK, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    assert weighted(template) == (expected["input_ids"], expected["assistant_masks"])
    assert weighted(without_markers(template)) == (expected["input_ids"], expected["assistant_masks"])


def test_a_template_that_ends_the_conversation_by_its_end_token() -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|pad|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    )
    tokens, weights = weighted(template)
    said = tokenizer().decode([token for token, weight in zip(tokens, weights, strict=True) if weight])
    assert said == "A loop.<|pad|>Another — loop.\n<|pad|>\n<|eos|>"


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }};{% endfor %}"
    with pytest.raises(DataError, match=r"example 0 .*writes message 1 in another way.*assistant_only_loss=False"):
        weighted(template)


def test_conversations_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(DataError, match=r"example 0 .*no token of it is the assistant's"):
        weighted(None, messages=TALK[:1])
    with pytest.raises(DataError, match=r"example 0 .*template refuses it .*only users"):
        weighted("{{ raise_exception('only users') }}")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"tools": "[find]"}, r"'tools', but its text is not JSON \(Expecting value at column 2\)"),
        ({"chat_template_kwargs": "abc"}, "'chat_template_kwargs', but it holds str 'abc'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"holds \\ud800, one half of a character"),
    ],
)
def test_what_goes_with_messages_is_checked(example: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"example 0 .*{words}"):
        documents([{"messages": TALK, **example}])


@pytest.mark.parametrize("assistant", [False, True])
def test_a_tokenizer_without_a_template_is_told_of(assistant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", None)
    with pytest.raises(DataError, match=r"example 0 .*the tokenizer has no chat template: set its chat_template"):
        documents([{"messages": TALK}], assistant_only_loss=assistant)


def test_tools_reach_the_template() -> None:
    template = "{{ tools[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
    [found] = documents(
        [{"messages": TALK[:1], "tools": '[{"name": "find"}]', "chat_template_kwargs": {"extra": "!"}}],
        chat_template=template,
    )
    assert tokenizer().decode(found.tokens) == "findWhat is for?!"
