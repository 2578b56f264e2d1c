"""instructor: answers as pydantic models."""

from __future__ import annotations

import harness
import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def ask(mode: instructor.Mode) -> None:
    """A person, in one of instructor's modes."""
    client = instructor.from_openai(OpenAI(), mode=mode)
    found = client.chat.completions.create(
        model=harness.MODEL,
        response_model=Person,
        max_retries=0,
        max_tokens=150,
        temperature=0,
        messages=[{"role": "user", "content": "Ada, 36"}],
    )
    assert isinstance(found, Person)


@harness.case
def by_tool() -> None:
    """a pydantic model by a tool call (`Mode.TOOLS`)"""
    ask(instructor.Mode.TOOLS)


@harness.case
def by_schema() -> None:
    """a pydantic model by a JSON schema (`Mode.JSON_SCHEMA`)"""
    ask(instructor.Mode.JSON_SCHEMA)


harness.main()
