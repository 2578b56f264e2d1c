"""The bodies of completion requests as pydantic models: OpenAI's fields, and vLLM's extensions. Fields that would
change an answer in a way that this server does not have are refused by name; others that it does not know are ignored
with a warning, or refused as well (`--strict-fields`)."""

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

from ttpu_core.generation.sampling_params import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from ttpu_serve.api.beam_search import MOST_PENALTY
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.given_fields import given_fields

MAX_STOPS = 16
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_PROMPTS = 16_384
MOST_WORDS = MAX_BAD_WORDS // 2
"""Of `bad_words`: each is written with a space before it and without."""
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


def as_list(value: Any) -> Any:
    """Return a text as a list of it, and any other value as it is."""
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
    BeforeValidator(as_list),
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
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
    Field(fail_fast=True),
    at_most(MOST_WORDS),
    BeforeValidator(as_list),
    WithJsonSchema(TEXT_OR_TEXTS),
]
Choices = Annotated[list[str], Field(fail_fast=True), at_most(MAX_CHOICES)]
FreeJson = Annotated[dict[str, Any], BeforeValidator(_flat)]
JsonOrText = Annotated[dict[str, Any] | str, BeforeValidator(_flat)]


Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field name → the values that have no effect, and why others are not served."""


class Body(BaseModel):
    """A request's body. Fields that are not served: `neutral` are those that would change the answer, which are refused
    with the reason unless they have a value without effect; `harmless` are those that would not, which are ignored with
    a warning. `place`: the path of this object in the request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[Unsupported] = {}
    harmless: ClassVar[Unsupported] = {}
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names, given = cls._names(), given_fields()
        kept = {name: value for name, value in data.items() if name in names}
        unserved = {name: value for name, value in data.items() if name not in names and value is not None}
        refused = {**cls.neutral, **cls.harmless} if given.strict else cls.neutral
        for name, value in unserved.items():
            values, why = refused.get(name, ((value,), ""))
            if not any(value is one or value == one for one in values):
                raise PydanticCustomError("unsupported_field", "{reason}", {"name": name, "reason": why})
        known = (*names, *cls.neutral, *cls.harmless)
        for name, value in data.items():
            if name in names or name in refused or (value is None and not given.strict):
                continue
            if name in cls.harmless and value in cls.harmless[name][0]:
                continue
            refusal = given.refusal_of(name, cls.place, () if name in cls.harmless else known)
            if refusal is not None:  # the first one alone: thousands of them would make as many errors
                raise PydanticCustomError("unknown_field", "{reason}", {"name": name, "reason": refusal})
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

    harmless: ClassVar[Unsupported] = {
        "include_obfuscation": ((False,), "streams are not padded here: leave it out"),
    }
    place: ClassVar[str] = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """A JSON schema that the output must match."""

    place: ClassVar[str] = "response_format.json_schema"

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: FreeJson | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the output."""

    place: ClassVar[str] = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


_BLANKS = "JSON has at most one blank between tokens here: leave it out"
_TAGS = "structural tags are not followed here: use a grammar"


class StructuredOutputs(Body):
    """vLLM's guided decoding: exactly one of these fields."""

    neutral: ClassVar[Unsupported] = {
        "whitespace_pattern": ((), _BLANKS),
        "disable_any_whitespace": ((False,), _BLANKS),
        "disable_additional_properties": ((False,), "schemas mean what they say here: say it in the schema"),
        "structural_tag": ((), _TAGS),
    }
    harmless: ClassVar[Unsupported] = {"disable_fallback": ((), "there is one guide here: leave it out")}
    place: ClassVar[str] = "structured_outputs"

    json_: JsonOrText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


ModelName = Annotated[
    str | None, Field(description="A name that /v1/models lists; the first of them if it is left out, as in vLLM.")
]


class Generation(Body):
    """The fields that chat and text completions share."""

    neutral: ClassVar[Unsupported] = {
        "suffix": (("",), "text is not inserted here: leave it out"),
        # vLLM's
        "logits_processors": (([],), "this server runs no code of clients: leave it out"),
        "spaces_between_special_tokens": ((True,), "text is always made with them: leave it out"),
        "structural_tag": ((), _TAGS),
        "guided_whitespace_pattern": ((), _BLANKS),
        "guided_json_object": ((False,), "it is an old form: use response_format"),
        "vllm_xargs": (({},), "this server has no plugins of vLLM: leave it out"),
        # Of other servers and libraries, for what has another name here.
        "max_new_tokens": ((), "it is called max_tokens here: use that"),
        "max_output_tokens": ((), "it is called max_tokens here: use that"),
        "stop_sequences": (([],), "it is called stop here: use that"),
        "do_sample": ((), "it is decided by temperature here: use that, 0 for no sampling"),
        "num_beams": ((1,), "it is called n with use_beam_search here: use those"),
        "no_repeat_ngram_size": ((0,), "n-grams are not forbidden here: use bad_words or repetition_penalty"),
        "typical_p": ((1,), "it is not sampled so here: use min_p or top_p"),
        "regex": ((), "it is called structured_outputs.regex here: use that"),
        "ebnf": ((), "it is called structured_outputs.grammar here: use that"),
        "grammar": ((), "it is called structured_outputs.grammar here: use that"),
        "json_schema": ((), "it is called structured_outputs.json here: use that"),
    }
    harmless: ClassVar[Unsupported] = {
        "store": ((False,), "this server stores no responses: leave it out"),
        "service_tier": (("auto", "default"), "this server has one tier: leave it out"),
        "guided_decoding_backend": (("auto",), "there is one guide here: leave it out"),
        "request_id": ((), "requests are named by the header x-request-id: use that"),
        "kv_transfer_params": ((), "caches are not sent between servers here: leave it out"),
    }

    model: ModelName = None
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
    prompt_logprobs: int | None = Field(None, ge=0, lt=2**31)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name a token token_id:N.")
    bad_words: BadWords | None = Field(None, description="Texts that the output never completes.")
    use_beam_search: bool | None = Field(None, description="The n likeliest sequences, found by beam search.")
    length_penalty: float | None = Field(None, ge=-MOST_PENALTY, le=MOST_PENALTY)
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
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

    @model_validator(mode="after")
    def _beams_are_asked_for(self) -> Generation:
        given = {"length_penalty": self.length_penalty not in (None, 1), "early_stopping": self.early_stopping}
        for name, means_something in given.items():
            if means_something and not self.use_beam_search:
                message = f"the field {name!r} was given without use_beam_search=true: leave it out, or set that."
                raise ApiError(message, param=name)
        return self

    @property
    def num_choices(self) -> int:
        """Sequences that are returned per prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated per prompt."""
        return self.num_choices

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the token counts so far, as vLLM's clients ask."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    neutral: ClassVar[Unsupported] = {
        **Generation.neutral,
        "prompt_embeds": ((), "prompts are text or token ids here: pass those"),
    }

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, lt=2**31)
    add_special_tokens: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128, description="Sequences of which the n likeliest are returned.")
    # vLLM's
    detokenize: bool | None = Field(None, description="False leaves out the text: ask for return_token_ids then.")

    @model_validator(mode="after")
    def _enough_to_choose_from(self) -> CompletionRequest:
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise ApiError(
                f"best_of is {self.best_of}, but n is {self.num_choices}, and the sequences that are returned are "
                "chosen among best_of: raise it, or lower n.",
                param="best_of",
            )
        if self.stream and self.ranks:
            raise ApiError(
                f"best_of is {self.best_of}, but a stream cannot be ranked before it ends: leave stream out, or ask "
                "for n of them.",
                param="best_of",
            )
        return self

    @property
    def ranks(self) -> bool:
        """Whether the sequences that are returned are chosen by their log-probability; beams are already."""
        return self.best_of is not None and self.best_of > 1 and not self.use_beam_search

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated per prompt."""
        return self.best_of if self.best_of is not None and self.ranks else self.num_choices


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    neutral: ClassVar[Unsupported] = {
        "normalize": ((True,), "embeddings have unit length here: leave it out"),
        "input_type": ((), "texts are embedded as they are: write what the model was trained with into the input"),
    }
    harmless: ClassVar[Unsupported] = {
        "priority": ((0,), "embeddings are computed in order: leave it out"),
    }

    model: ModelName = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    pooling: Literal["auto", "last", "mean", "cls"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
