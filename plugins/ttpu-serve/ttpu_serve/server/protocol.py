"""The bodies of completion requests as pydantic models: OpenAI's fields, and vLLM's extensions. Unknown fields are
refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ttpu_core.generation.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from ttpu_serve.server.errors import ApiError

MAX_STOPS = 16
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_PROMPTS = 16_384
MAX_CHOICES = 4096
MAX_TOKEN_LIST = 262_144
MAX_DEPTH = 128
"""Of schemas and other free JSON: what reads them, recurses."""
TEXT_OR_TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPTS_SCHEMA: dict[str, Any] = {
    "anyOf": [*TEXT_OR_TEXTS["anyOf"], IDS, {"type": "array", "items": IDS}],
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
}

Prompt = str | list[int]


def read_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of any of OpenAI's four forms as a list.

    Raises:
        ValueError: the value has another form, holds too many prompts, or an unpaired surrogate.
    """
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and all(_is_id(item) for item in value):
        prompts = [value]
    elif isinstance(value, list) and value:
        prompts = value
    else:
        raise ValueError("it must be a text, a list of texts, a list of token ids, or a list of such lists")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"it has {len(prompts):,} prompts, but at most {MAX_PROMPTS:,} are allowed")
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


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a list or an object with more than `most` items before its items are
    validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"it has {len(value):,} items, but at most {most:,} are allowed")
        return value

    return BeforeValidator(check)


def _flat(value: Any) -> Any:
    """Check that JSON is nested at most `MAX_DEPTH` deep."""
    level, depth = [value], 0
    while level := [
        item
        for one in level
        if isinstance(one, dict | list)
        for item in (one.values() if isinstance(one, dict) else one)
        if isinstance(item, dict | list)
    ]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels, which is the most that is read")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_keys(value: Any) -> Any:
    """Convert keys such as in {"50256": -100} to token ids."""
    if not isinstance(value, Mapping):
        return value
    if not all(_TOKEN_KEY.fullmatch(str(key)) for key in value):  # int() reads "01" and " 1_0 " as well
        raise ValueError("its keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


Prompts = Annotated[list[Prompt], PlainValidator(read_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(fail_fast=True),
    at_most(MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(TEXT_OR_TEXTS),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_keys),
    at_most(MAX_LOGIT_BIAS),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_TOKEN_LIST)]
Choices = Annotated[list[str], Field(fail_fast=True), at_most(MAX_CHOICES)]
FreeJson = Annotated[dict[str, Any], BeforeValidator(_flat)]
JsonOrText = Annotated[dict[str, Any] | str, BeforeValidator(_flat)]


class Body(BaseModel):
    """A request's body. `neutral` lists unsupported fields with the values that have no effect and are accepted, and
    the reason why others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if name in cls._names()}
        if unknown := next((name for name in data if name not in kept and name not in cls.neutral), None):
            kept[unknown] = None  # pydantic refuses it; thousands of them would make as many errors
        for name, (values, reason) in cls.neutral.items():
            given = data.get(name)
            if given is not None and not any(given is value or given == value for value in values):
                raise PydanticCustomError("unsupported_field", "{reason}", {"name": name, "reason": reason})
        return kept

    @classmethod
    def _names(cls) -> frozenset[str]:
        """Return the field names that clients use."""
        return _names_of(cls)


@cache
def _names_of(kind: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class StreamOptions(Body):
    """What a stream contains besides the output."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """A JSON schema that the output must match."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: FreeJson | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's guided decoding: exactly one of these fields."""

    json_: JsonOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Body):
    """The fields that chat and text completions share."""

    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "store": ((False,), "this server stores no responses: leave it out"),
        "service_tier": (("auto", "default"), "this server has one tier: leave it out"),
        "best_of": ((1,), "sequences are not ranked here: ask for n of them and choose"),
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
    # Without effect on the output by their definition.
    user: str | None = None
    metadata: FreeJson | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            message = "the field 'stream_options' was given without stream=true: leave it out, or set that."
            raise ApiError(message, param="stream_options")
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated per prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
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
    pooling: Literal["auto", "last", "mean", "cls"] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
