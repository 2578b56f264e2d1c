"""What the fields of request bodies may hold: the first and last value that is taken, the next that is not, and the
values that have no effect of fields that are not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ttpu_serve.server.batches.protocol import BatchRequest
from ttpu_serve.server.body import MOST_CONTAINERS, MOST_DEPTH, check_shape
from ttpu_serve.server.chat_protocol import ChatRequest
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.messages_protocol import MessagesRequest
from ttpu_serve.server.openai_responses_protocol import ResponsesRequest
from ttpu_serve.server.protocol import Body, CompletionRequest, DetokenizeRequest, EmbeddingRequest
from ttpu_serve.server.response_store import MOST_BYTES, MOST_RESPONSES
from ttpu_serve.server.scoring import RerankRequest, ScoreRequest
from ttpu_serve.server.service import BODY_BYTES, BODY_BYTES_PER_TOKEN, BODY_VALUES, BODY_VALUES_PER_TOKEN
from ttpu_serve.server.settings import MIB

USER: Any = [{"role": "user", "content": "x"}]
LEAST: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": USER},
    MessagesRequest: {"model": "m", "messages": USER, "max_tokens": 5},
    ResponsesRequest: {"model": "m", "input": "x"},
    EmbeddingRequest: {"model": "m", "input": "x"},
    ScoreRequest: {"model": "m", "text_1": "x", "text_2": "x"},
    RerankRequest: {"model": "m", "query": "x", "documents": ["x"]},
    BatchRequest: {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
    DetokenizeRequest: {"tokens": []},
}
WORD, ANY = 2**31 - 1, 2**62


def takes(kind: type[Body], **fields: Any) -> bool:
    """Whether a body of this kind may have these fields, in a server that refuses what it does not know."""
    try:
        kind.model_validate(LEAST[kind] | fields)
    except (ValidationError, ApiError):
        return False
    return True


RANGES: list[tuple[type[Body], str, Any, Any]] = [
    (CompletionRequest, "max_tokens", 0, ANY),
    (CompletionRequest, "temperature", 0.0, 2.0),
    (CompletionRequest, "top_p", 0.0, 1.0),
    (CompletionRequest, "n", 1, 128),
    (CompletionRequest, "best_of", 1, 128),
    (CompletionRequest, "seed", -(2**63), 2**63 - 1),
    (CompletionRequest, "presence_penalty", -2.0, 2.0),
    (CompletionRequest, "frequency_penalty", -2.0, 2.0),
    (CompletionRequest, "top_k", -1, WORD),
    (CompletionRequest, "min_p", 0.0, 1.0),
    (CompletionRequest, "repetition_penalty", 0.01, 1e9),
    (CompletionRequest, "min_tokens", 0, ANY),
    (CompletionRequest, "prompt_logprobs", 0, WORD),
    (CompletionRequest, "logprobs", 0, WORD),
    (CompletionRequest, "priority", -(2**31), WORD),
    (CompletionRequest, "truncate_prompt_tokens", -1, WORD),
    (ChatRequest, "max_completion_tokens", 1, ANY),
    (ChatRequest, "thinking_token_budget", 0, WORD),
    (MessagesRequest, "max_tokens", 1, ANY),
    (MessagesRequest, "temperature", 0.0, 2.0),
    (MessagesRequest, "top_p", 0.0, 1.0),
    (MessagesRequest, "top_k", -1, WORD),
    (ResponsesRequest, "max_output_tokens", 1, ANY),
    (ResponsesRequest, "temperature", 0.0, 2.0),
    (ResponsesRequest, "top_p", 0.0, 1.0),
    (EmbeddingRequest, "dimensions", 1, ANY),
    (EmbeddingRequest, "truncate_prompt_tokens", -1, WORD),
    (ScoreRequest, "truncate_prompt_tokens", -1, WORD),
    (RerankRequest, "top_n", 0, ANY),
]


@pytest.mark.parametrize(("kind", "name", "least", "most"), RANGES)
def test_a_number_has_a_first_and_a_last_value(kind: type[Body], name: str, least: Any, most: Any) -> None:
    step = 1 if isinstance(least, int) else 0.01
    assert takes(kind, **{name: least}) and takes(kind, **{name: most})
    assert not takes(kind, **{name: least - step})
    if most not in (ANY, 1e9):  # these have no last value
        assert not takes(kind, **{name: most + step})


LENGTHS: list[tuple[type[Body], str, int, int]] = [
    (CompletionRequest, "cache_salt", 1, 256),
    (ResponsesRequest, "previous_response_id", 0, 256),
]


@pytest.mark.parametrize(("kind", "name", "least", "most"), LENGTHS)
def test_a_text_has_a_length(kind: type[Body], name: str, least: int, most: int) -> None:
    assert takes(kind, **{name: "x" * least}) and takes(kind, **{name: "x" * most})
    assert not takes(kind, **{name: "x" * (most + 1)})
    assert least == 0 or not takes(kind, **{name: ""})


@pytest.mark.parametrize(("length", "taken"), [(64, True), (65, False)])
def test_a_form_has_a_name(length: int, taken: bool) -> None:
    form = {"name": "x" * length, "schema": {}}
    assert takes(ChatRequest, response_format={"type": "json_schema", "json_schema": form}) == taken
    assert takes(ResponsesRequest, text={"format": {"type": "json_schema", **form}}) == taken


COUNTS: list[tuple[type[Body], str, Any, int]] = [
    (CompletionRequest, "stop", ["x"], 16),
    (CompletionRequest, "prompt", ["x"], 16_384),
    (CompletionRequest, "stop_token_ids", [1], 262_144),
    (CompletionRequest, "guided_choice", ["x"], 4096),
    (CompletionRequest, "bad_words", ["x"], 1024),
    (ChatRequest, "messages", USER, 8192),
    (MessagesRequest, "messages", USER, 8192),
    (ResponsesRequest, "input", USER, 8192),
]


@pytest.mark.parametrize(("kind", "name", "item", "most"), COUNTS)
def test_a_list_has_a_last_item(kind: type[Body], name: str, item: Any, most: int) -> None:
    assert takes(kind, **{name: item * most}) and not takes(kind, **{name: item * (most + 1)})


def test_as_many_tools_as_may_be() -> None:
    for kind, tools in (
        (ChatRequest, [{"type": "function", "function": {"name": f"f{number}"}} for number in range(513)]),
        (MessagesRequest, [{"name": f"f{number}", "input_schema": {"type": "object"}} for number in range(513)]),
        (ResponsesRequest, [{"type": "function", "name": f"f{number}", "parameters": {}} for number in range(513)]),
    ):
        assert takes(kind, tools=tools[:512]) and not takes(kind, tools=tools), kind


def test_as_many_calls_as_a_message_may_have() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for count, taken in ((512, True), (513, False)):
        messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call] * count}]
        assert takes(ChatRequest, messages=messages) == taken, count


def test_maps_have_a_last_key_and_last_values() -> None:
    bias = {str(token): 1.0 for token in range(300)}
    assert takes(CompletionRequest, logit_bias=bias) and not takes(CompletionRequest, logit_bias=bias | {"300": 1.0})
    for token, value, taken in (
        ("0", 100, True), ("0", -100, True), ("0", 100.5, False), ("0", -100.5, False), (str(WORD), 1, True),
        (str(WORD + 1), 1, False), ("9999999999", 1, False), ("00", 1, False), ("-1", 1, False),
    ):  # fmt: skip
        assert takes(CompletionRequest, logit_bias={token: value}) == taken, (token, value)
    keys = {f"{number:064}": "x" * 512 for number in range(16)}
    assert takes(BatchRequest, metadata=keys) and not takes(BatchRequest, metadata=keys | {"more": "x"})
    assert not takes(BatchRequest, metadata={"x" * 65: "x"}) and not takes(BatchRequest, metadata={"x": "x" * 513})


def test_token_ids_are_32_bit_numbers() -> None:
    for token, taken in ((0, True), (WORD, True), (-1, False), (WORD + 1, False), (True, False), (1.0, False)):
        assert takes(CompletionRequest, prompt=[token]) == taken, token
        assert takes(CompletionRequest, prompt=[[token], [1]]) == taken, token
        assert takes(CompletionRequest, stop_token_ids=[token]) == taken, token
        assert takes(DetokenizeRequest, tokens=[token]) == taken, token


def test_free_json_has_a_depth() -> None:
    value: Any = {}
    for _ in range(127):
        value = {"a": value}
    assert takes(CompletionRequest, guided_json=value) and takes(CompletionRequest, metadata=value)
    for deeper in ({"a": value}, {"a": [value]}):
        assert not takes(CompletionRequest, guided_json=deeper) and not takes(CompletionRequest, metadata=deeper)


def test_files_of_batches_expire_within_an_hour_and_thirty_days() -> None:
    for seconds, taken in ((3600, True), (30 * 86_400, True), (3599, False), (30 * 86_400 + 1, False)):
        expires = {"anchor": "created_at", "seconds": seconds}
        assert takes(BatchRequest, output_expires_after=expires) == taken, seconds


NEUTRAL: list[tuple[type[Body], dict[str, Any]]] = [
    (
        CompletionRequest,
        {
            "suffix": "", "logits_processors": [], "spaces_between_special_tokens": True, "guided_json_object": False,
            "vllm_xargs": {}, "stop_sequences": [], "num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1,
            "store": False, "service_tier": "default", "guided_decoding_backend": "auto", "length_penalty": 1,
            "structured_outputs": {
                "regex": "a", "disable_any_whitespace": False, "disable_additional_properties": False
            },
        },
    ),
    (
        ChatRequest,
        {
            "functions": [], "function_call": "auto", "modalities": ["text"], "verbosity": "medium", "documents": [],
            "best_of": 1, "detokenize": True, "service_tier": "auto", "mm_processor_kwargs": {}, "media_io_kwargs": {},
            "stream": True, "stream_options": {"include_obfuscation": False},
            "messages": [*USER, {"role": "assistant", "content": "x", "annotations": []}],
        },
    ),
    (ChatRequest, {"function_call": "none"}),
    (MessagesRequest, {"mcp_servers": [], "output_config": {}, "stop": [], "service_tier": "standard_only"}),
    (
        ResponsesRequest,
        {
            "background": False, "top_logprobs": 0, "truncation": "disabled", "stop": [], "include": [],
            "service_tier": "auto", "text": {"verbosity": "medium"},
        },
    ),
    (EmbeddingRequest, {"normalize": True, "priority": 0}),
    (
        ScoreRequest,
        {"activation": False, "softmax": False, "use_activation": False, "priority": 0, "truncation_side": "right"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), NEUTRAL)
def test_values_without_effect_are_taken_of_fields_that_are_not_served(kind: type[Body], fields: Any) -> None:
    for name, value in fields.items():
        assert takes(kind, **{name: value} | ({"stream": True} if name == "stream_options" else {})), name


CHANGING: list[tuple[type[Body], dict[str, Any]]] = [
    (
        CompletionRequest,
        {
            "suffix": "x", "spaces_between_special_tokens": False, "guided_json_object": True, "vllm_xargs": {"a": 1},
            "stop_sequences": ["x"], "num_beams": 2, "no_repeat_ngram_size": 1, "typical_p": 0.5, "length_penalty": 2,
            "structured_outputs": {"regex": "a", "disable_any_whitespace": True},
        },
    ),
    (ChatRequest, {"functions": [{}], "modalities": ["audio"], "verbosity": "low", "best_of": 2, "detokenize": False}),
    (MessagesRequest, {"mcp_servers": [{}], "stop": ["x"]}),
    (ResponsesRequest, {"background": True, "top_logprobs": 1, "truncation": "auto", "stop": ["x"]}),
    (EmbeddingRequest, {"normalize": False}),
    (ScoreRequest, {"activation": True, "softmax": True}),
]  # fmt: skip


def test_a_body_that_belongs_to_no_request_has_no_unknown_fields() -> None:
    assert takes(CompletionRequest, user="x") and not takes(CompletionRequest, made_up="x")


def test_of_many_mistakes_in_a_list_the_first_is_told() -> None:
    for kind, name in ((ScoreRequest, "text_1"), (RerankRequest, "documents"), (DetokenizeRequest, "tokens")):
        with pytest.raises(ValidationError) as refusal:
            kind.model_validate(LEAST[kind] | {name: [{}] * 1000})
        assert len({problem["loc"] for problem in refusal.value.errors()}) == 1, kind


def test_best_of_is_how_many_are_generated() -> None:
    for given, generated in (({}, 1), ({"n": 2}, 2), ({"n": 2, "best_of": 3}, 3), ({"best_of": 1}, 1)):
        assert CompletionRequest.model_validate(LEAST[CompletionRequest] | given).num_sequences == generated, given


def test_objects_and_arrays_in_one_another_count_together() -> None:
    half = MOST_DEPTH // 2
    check_shape(b'{"a":[' * half, 10**6)
    check_shape(b"[" * (MOST_DEPTH - 1) + b"[]," * 9, 10**6)
    with pytest.raises(ApiError, match="levels"):
        check_shape(b'{"a":[' * (half + 1), 10**6)


def test_commas_of_texts_are_no_values() -> None:
    body = b'[",,,,",' + b"1," * 96 + b"1]"
    check_shape(body, 98)
    with pytest.raises(ApiError, match="98 values or more"):
        check_shape(body, 97)


def test_the_limits_are_those_of_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert f"{MOST_CONTAINERS:,} objects and arrays, {MOST_DEPTH} of them in one another" in text
    assert f"{MOST_RESPONSES:,} of them and {MOST_BYTES >> 20} MiB at most" in text
    assert f"{BODY_VALUES:,} values and {BODY_VALUES_PER_TOKEN} for each token" in text
    assert f"at most {BODY_BYTES // MIB} MiB and {BODY_BYTES_PER_TOKEN} bytes for each token" in text


@pytest.mark.parametrize(("kind", "fields"), CHANGING)
def test_values_that_would_change_the_answer_are_refused(kind: type[Body], fields: Any) -> None:
    for name, value in fields.items():
        assert not takes(kind, **{name: value}), name
