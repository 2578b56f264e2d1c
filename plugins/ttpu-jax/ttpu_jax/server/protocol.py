"""What completion requests may say, as pydantic models: OpenAI's fields, and vLLM's beyond them. What is not listed is
refused by name, for nothing that a client asks for is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from ttpu_jax.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ttpu_jax.server.errors import ApiError

MAX_STOPS = 16
TEXT_OR_TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPTS_SCHEMA: dict[str, Any] = {
    "anyOf": [*TEXT_OR_TEXTS["anyOf"], IDS, {"type": "array", "items": IDS}],
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
}

Prompt = str | list[int]


def read_prompts(value: Any) -> list[Prompt]:
    """A prompt in each of the four forms that OpenAI takes, as a list of prompts."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and all(_is_id(item) for item in value):
        prompts = [value]
    elif isinstance(value, list) and value:
        prompts = value
    else:
        raise ValueError("it must be a text, a list of texts, a list of token ids, or a list of such lists")
    for prompt in prompts:
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt)))):
            raise ValueError("it must hold texts, or token ids that are whole numbers, and no empty list")
        if isinstance(prompt, str):
            _check_unicode(prompt)
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is no Unicode character") from error


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_keys(value: Any) -> Any:
    """{"50256": -100}, as JSON has to write it, with token ids for keys."""
    if not isinstance(value, Mapping):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except (TypeError, ValueError):
        raise ValueError("its keys must be token ids") from None


Prompts = Annotated[list[Prompt], PlainValidator(read_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOPS),
    WithJsonSchema(TEXT_OR_TEXTS),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_keys),
    Field(max_length=MAX_LOGIT_BIAS),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class Body(BaseModel):
    """A request's body. `neutral` lists fields that mean something this server does not do, with the values under which
    they mean nothing, and why others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for name, (values, reason) in cls.neutral.items():
            given = kept.pop(name, None)
            if given is not None and not any(given is value or given == value for value in values):
                raise ApiError(f"the field {name!r} was given, but {reason}.", param=name, code="unsupported_field")
        return kept


class StreamOptions(Body):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """A schema that the answer must match."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's name for guided decoding: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Body):
    """The fields that chats and plain completions share."""

    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "store": ((False,), "this server keeps no answers: leave it out"),
        "service_tier": (("auto", "default"), "this server has one tier: leave it out"),
        "best_of": ((1,), "answers are not ranked here: ask for n of them and choose"),
        "suffix": (("",), "text is not inserted here: leave it out"),
    }

    model: str = Field(description="A name that /v1/models lists.")
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Without effect on the answer by their definition.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            message = "the field 'stream_options' was given without stream=true: leave it out, or set that."
            raise ApiError(message, param="stream_options")
        return self

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
