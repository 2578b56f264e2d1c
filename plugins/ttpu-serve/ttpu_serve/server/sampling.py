"""Converts the fields of a request to the engine's `SamplingParams`; the server's settings supply defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.server.chat_protocol import ChatRequest
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.protocol import CompletionRequest, Generation

COMPLETION_TOKENS = 16
"""max_tokens of a plain completion that does not say: OpenAI's default."""
LEAST_TOP_P = 1e-6
"""OpenAI takes a top_p of 0, which leaves the likeliest token alone."""
_SAME_NAME = ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


def of_completion(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a text completion. For `max_tokens` 0 the engine generates one token that is not
    reported."""
    tokens = COMPLETION_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, request.logprobs)
    return _params(
        request,
        defaults,
        max_tokens=tokens,
        logprobs=0 if request.ranks and request.logprobs is None else request.logprobs,
        prompt_logprobs=prompt_logprobs,
        guided=guide_of(request),
        detokenize=request.detokenize is not False,
    )


def of_chat(request: ChatRequest, defaults: Mapping[str, Any], tools: GuidedDecoding | None) -> SamplingParams:
    """Return the parameters of a chat completion; `tools` is the guide of a required tool call.

    Raises:
        ApiError: the request has both a required tool call and another prescribed form, or an invalid value.
    """
    guided = guide_of(request)
    if guided is not None and tools is not None:
        raise ApiError(
            "a tool must be called by 'tool_choice', but the output's format was given as well: leave one of them out.",
            param="tool_choice",
        )
    return _params(
        request,
        defaults,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        guided=guided or tools,
    )


def guide_of(request: Generation) -> GuidedDecoding | None:
    """Return the guide that the request specifies, or None.

    Raises:
        ApiError: more than one guide is specified, or one is invalid.
    """
    found = [*_of_response_format(request)]
    if outputs := request.structured_outputs:
        json: Any = outputs.json_ if outputs.json_ is not None else (outputs.json_object or None)
        choice = None if outputs.choice is None else tuple(outputs.choice)
        try:
            found.append(GuidedDecoding(json, outputs.regex, choice, outputs.grammar))
        except RequestError as error:
            raise ApiError(str(error), param="structured_outputs") from error
    fields: tuple[tuple[str, Any], ...] = (
        ("json", request.guided_json),
        ("regex", request.guided_regex),
        ("choice", None if request.guided_choice is None else tuple(request.guided_choice)),
        ("grammar", request.guided_grammar),
    )
    for name, value in fields:
        if value is not None:
            try:
                found.append(GuidedDecoding(**{name: value}))
            except RequestError as error:
                raise ApiError(str(error), param=f"guided_{name}") from error
    if len(found) > 1:
        raise ApiError(
            "the output's format was given more than once, by response_format, structured_outputs or guided_...: "
            "pass one.",
            param="response_format",
        )
    return found[0] if found else None


def _of_response_format(request: Generation) -> list[GuidedDecoding]:
    form = request.response_format
    if form is None:
        return []
    if form.json_schema is not None and form.type != "json_schema":
        raise ApiError(
            f"response_format is of type {form.type}, but has a 'json_schema', which would be of no effect: leave it "
            "out, or set type to json_schema.",
            param="response_format.json_schema",
        )
    if form.type == "text":
        return []
    if form.type == "json_object":
        return [GuidedDecoding(json=True)]
    if form.json_schema is None:
        raise ApiError(
            "response_format is of type json_schema, but has no 'json_schema': pass it.",
            param="response_format.json_schema",
        )
    schema = form.json_schema.schema_
    return [GuidedDecoding(json=True if schema is None else schema)]


def _params(request: Generation, defaults: Mapping[str, Any], **values: Any) -> SamplingParams:
    asked: dict[str, Any] = dict(defaults)
    for name in (*_SAME_NAME, *_FLAGS):
        if (value := getattr(request, name)) is not None:
            asked[name] = value
    if request.top_p is not None:
        asked["top_p"] = max(request.top_p, LEAST_TOP_P)
    if request.top_k is not None:
        asked["top_k"] = max(request.top_k, 0)
    if request.seed is not None:
        asked["seed"] = request.seed % 2**32
    return SamplingParams(
        n=request.num_sequences,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=request.logit_bias or {},
        bad_words=tuple(request.bad_words or ()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        **{**asked, **values},
    )
