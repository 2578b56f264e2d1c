"""The sampling parameters of one request: a frozen `SamplingParams`, whose values are checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.token_choice import TokenChoice

MAX_LOGPROBS = 20
"""Alternatives that one token may be reported with, unless the engine is told otherwise: the OpenAI API's limit."""
MAX_LOGIT_BIAS = 300
"""Tokens that one request may bias or forbid, stop tokens under `min_tokens` included: the OpenAI API's limit."""
MAX_BAD_WORDS = 2048
"""Words, or sequences of token ids, that one request may forbid."""
MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORD_TOKENS = 256, 64
"""Of one of them."""


@dataclass(frozen=True)
class GuidedDecoding:
    """What the output must match: exactly one of these. `json` is a JSON schema (a dict, or its text) or True for any
    JSON object, `regex` a regular expression, `choice` a list of texts, `grammar` a Lark or llguidance grammar.

    prelude: what comes before, such as reasoning: Lark rules of which `start` ends with the rule `answer`, which is one
    of the first three."""

    json: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    prelude: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: none or several of the fields are given, `choice` has an empty text, or a `grammar` has a
                `prelude`.
        """
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"guided decoding was given {', '.join(given) or 'nothing'}, but it follows exactly one of json, "
                "regex, choice and grammar: pass one."
            )
        if self.prelude is not None and self.grammar is not None:
            raise RequestError(
                "guided decoding was given a prelude with a grammar, but only json, regex and choice have one: write "
                "it into the grammar."
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not all(isinstance(text, str) and text for text in self.choice or ("",)):
                raise RequestError("guided decoding's choice must be texts that are not empty: correct it.")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """vLLM's name and form of `GuidedDecoding`: exactly one of these. `json_object` asks for any JSON object."""

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: none or several of the fields are given, or `choice` has an empty text.
        """
        if self.json is not None and self.json_object:
            raise RequestError("structured_outputs has json and json_object, but follows one of them: leave one out.")
        object.__setattr__(self, "choice", self.guided.choice)

    @property
    def guided(self) -> GuidedDecoding:
        """The same as the engine takes it."""
        form = True if self.json is None and self.json_object else self.json
        return GuidedDecoding(form, self.regex, self.choice, self.grammar)


@dataclass(frozen=True)
class SamplingParams(TokenChoice):
    """How one request wants its tokens chosen, and when to stop; names are vLLM's and OpenAI's.

    temperature: 1 unless said otherwise; 0 is greedy. The other numbers are those of the base class.
    n: sequences of one prompt. Sequence i draws with seed + i.
    max_tokens: the most tokens to add; None is all that the context holds.
    min_tokens: no end of sequence and no stop token before so many.
    stop: texts that end the output, which does not hold them (unless `include_stop_str_in_output`).
    stop_token_ids: tokens that end it, beside the model's own end of sequence, which `ignore_eos` lets pass.
    logprobs: None, or how many alternatives to report beside each token (0: the token's own).
    prompt_logprobs: the same of each prompt token.
    logit_bias: token id → added to its logit.
    allowed_token_ids: no other token is ever chosen.
    bad_words: texts, or sequences of token ids, that the output never completes. A text is forbidden as the tokenizer
    writes it with a space before it and without.
    guided: what the output must match; `structured_outputs` is the same in vLLM's form, a StructuredOutputsParams.
    detokenize: False leaves out text, and stop strings with it.
    """

    temperature: float = 1.0
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    guided: GuidedDecoding | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Convert values to the types of the fields and check them.

        Raises:
            RequestError: a value has the wrong type or is out of range, or two values contradict each other.
        """
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.top_k == -1:
            put("top_k", 0)  # vLLM's word for all tokens
        put("stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        put("stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}, but a mapping from token ids to numbers is needed.")
        put("logit_bias", dict(self.logit_bias or {}))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else _listed("bad_words", self.bad_words)
        read = (word if isinstance(word, str) else _listed("a word of bad_words", word) for word in words)
        put("bad_words", tuple(read))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids))
        if isinstance(self.guided, Mapping):
            unknown = sorted(set(self.guided) - set(GuidedDecoding.__dataclass_fields__))
            if unknown:
                raise RequestError(f"guided has {', '.join(unknown)}, but json, regex, choice and grammar are known.")
            put("guided", GuidedDecoding(**self.guided))
        if self.guided is not None and not isinstance(self.guided, GuidedDecoding):
            raise RequestError(
                f"guided is {self.guided!r}, but a GuidedDecoding, or a mapping of its fields, is needed."
            )
        self._read_structured_outputs(put)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}: it must be True or False.")
        self.validate()

    def _read_structured_outputs(self, put: Callable[[str, Any], None]) -> None:
        """Set `guided` to what `structured_outputs` asks for."""
        asked = self.structured_outputs
        if asked is None:
            return
        if isinstance(asked, Mapping):
            unknown = sorted(set(asked) - set(StructuredOutputsParams.__dataclass_fields__))
            if unknown:
                raise RequestError(
                    f"structured_outputs has {', '.join(unknown)}, but json, regex, choice, grammar and json_object "
                    "are known: leave the others out."
                )
            asked = StructuredOutputsParams(**asked)
            put("structured_outputs", asked)
        if not isinstance(asked, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs is {asked!r}, but a StructuredOutputsParams, or a mapping of its fields, is "
                "needed: pass one."
            )
        if self.guided not in (None, asked.guided):
            raise RequestError("guided and structured_outputs were both given, two names of one setting: pass one.")
        put("guided", asked.guided)

    def validate(self) -> None:
        """Check the values.

        Raises:
            RequestError: a value is out of range, or two values contradict each other; the message names the first one.
        """
        super().validate()
        _whole("n", self.n, 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower the one or raise the "
                "other."
            )
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop is {list(self.stop)!r}, but texts that are not empty are needed: correct it.")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings were given with detokenize=False, which makes no text: leave one out.")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _whole(name, token, 0)
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids is empty, so that no token could be chosen: name some, or leave it out."
            )
        self._check_bad_words()
        for token, bias in self.logit_bias.items():
            _whole("a token of logit_bias", token, 0)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token} is {bias!r}: it must be a number from -100 to 100.")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias names {len(self.logit_bias)} tokens, but at most {MAX_LOGIT_BIAS} are allowed: name fewer."
            )

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words holds {len(self.bad_words):,} words, but at most {MAX_BAD_WORDS:,} are allowed: name fewer."
            )
        for word in self.bad_words:
            if not word:
                raise RequestError("bad_words holds a word that is empty: leave it out.")
            text = isinstance(word, str)
            most, parts = (MAX_BAD_WORD_CHARACTERS, "characters") if text else (MAX_BAD_WORD_TOKENS, "tokens")
            if len(word) > most:
                raise RequestError(
                    f"a word of bad_words has {len(word):,} {parts}, but at most {most} are allowed: shorten it."
                )
            if not isinstance(word, str) and not all(type(token) is int and token >= 0 for token in word):
                raise RequestError(
                    f"bad_words holds {list(word)!r}, but token ids are whole numbers, 0 or more: correct it."
                )

    def of_sequence(self, index: int) -> SamplingParams:
        """The parameters of sequence `index` of `n`, as a request of its own."""
        own = copy(self)  # not checked again, which takes long where there are many tokens
        object.__setattr__(own, "n", 1)
        object.__setattr__(own, "seed", None if self.seed is None else (self.seed + index) % 2**32)
        return own


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(f"{name} is {value!r}: it must be a whole number, {low} or more.")


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}: a list is needed.")
    return tuple(value)
