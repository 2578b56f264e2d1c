"""litellm's provider hosted_vllm, as its users ask a server of vLLM."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is looked for on the internet

import harness
import litellm

ASKED = {"model": f"hosted_vllm/{harness.MODEL}", "api_base": f"{harness.URL}/v1", "api_key": "none"}
HELLO = [{"role": "user", "content": "How do I open a file?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,  # which a random answer would fill until its tokens are used up
        },
    },
}


@harness.case
def chat() -> None:
    """a chat, whole and streamed"""
    whole = litellm.completion(messages=HELLO, max_tokens=12, temperature=0, **ASKED)
    assert whole.usage.completion_tokens <= 12 and whole.choices[0].message.content
    chunks = litellm.completion(
        messages=HELLO, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}, **ASKED
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


@harness.case
def guided() -> None:
    """a chat whose form is prescribed by vLLM's `guided_choice`"""
    answer = litellm.completion(messages=HELLO, extra_body={"guided_choice": ["yes", "no"]}, **ASKED)
    assert answer.choices[0].message.content in ("yes", "no")


@harness.case
def tools() -> None:
    """a tool that must be called"""
    asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    answer = litellm.completion(messages=HELLO, **asked, **ASKED)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and "city" in call.function.arguments


@harness.case
def refusal() -> None:
    """a refusal, as litellm's own exception"""
    try:
        litellm.completion(messages=HELLO, temperature=9, **ASKED)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("it was not refused")


harness.main()
