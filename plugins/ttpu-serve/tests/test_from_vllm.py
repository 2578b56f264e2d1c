"""docs/from-vllm.md says what the code does: its tables are those that its script writes, and each row is so."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ttpu_serve.server.chat_protocol import ChatRequest
from ttpu_serve.server.given_fields import GIVEN_FIELDS, GivenFields
from ttpu_serve.server.protocol import Body, CompletionRequest, EmbeddingRequest, StreamOptions, StructuredOutputs

ROOT = Path(__file__).parents[3]
BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    (CompletionRequest, {"model": "m", "prompt": "hi"}),
    (EmbeddingRequest, {"model": "m", "input": "hi"}),
    (StreamOptions, {}),
    (StructuredOutputs, {"regex": "a"}),
]


@pytest.fixture
def lenient() -> Iterator[GivenFields]:
    fields = GivenFields(strict=False)
    token = GIVEN_FIELDS.set(fields)
    yield fields
    GIVEN_FIELDS.reset(token)


def test_the_tables_are_those_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts/write_from_vllm.py"))
    written = (ROOT / "docs/from-vllm.md").read_text()
    assert script["filled"](written) == written, "run `python scripts/write_from_vllm.py`"


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[kind.__name__ for kind, _ in BODIES])
def test_fields_that_would_change_an_answer_are_refused_and_others_ignored(
    lenient: GivenFields, kind: type[Body], body: dict[str, Any]
) -> None:
    other = {"of": "a value with a meaning"}
    for name, (values, reason) in kind.neutral.items():
        for value in values:
            kind.model_validate({**body, name: value})
        if name not in kind._names():
            with pytest.raises(ValidationError, match=reason.partition(":")[0][:40]):
                kind.model_validate({**body, name: other})
    assert not lenient.ignored
    for name, (values, _) in kind.harmless.items():
        for value in values:
            kind.model_validate({**body, name: value})
        kind.model_validate({**body, name: other})
    assert len(lenient.ignored) == len(kind.harmless)
