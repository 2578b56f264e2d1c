"""langchain-openai's chat model."""

from __future__ import annotations

import harness
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = ChatOpenAI(model=harness.MODEL, temperature=0, max_tokens=60, stream_usage=True)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(pattern="^(Oslo|Rome)$")


@harness.case
def chat() -> None:
    """a chat: invoked, streamed, in a batch"""
    whole = MODEL.invoke("How do I open a file?")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 60
    chunks = list(MODEL.stream("How do I open a file?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)
    assert [answer.content for answer in MODEL.batch(["How do I open a file?"] * 2)] == [whole.content] * 2


@harness.case
def structured() -> None:
    """structured output, by `response_format` and by a tool"""
    for method in ("json_schema", "function_calling"):
        found = MODEL.with_structured_output(Weather, method=method).invoke("Where?")
        assert isinstance(found, Weather), found


@harness.case
def completion() -> None:
    """a text completion"""
    assert OpenAI(model=harness.MODEL, temperature=0, max_tokens=9).invoke("The with statement is used")


harness.main()
