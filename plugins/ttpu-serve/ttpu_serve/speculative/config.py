"""Settings of speculative decoding, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ttpu_core.errors import RequestError

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
METHODS = (NGRAM, DRAFT_MODEL)


@dataclass(frozen=True)
class SpeculativeConfig:
    """The drafting method and its parameters.

    method: "ngram" copies the continuation of an earlier occurrence of the last tokens; "draft_model" runs a smaller
    model with the same vocabulary.
    num_speculative_tokens: maximum draft tokens per request and step.
    prompt_lookup_min, prompt_lookup_max: for "ngram", the range of n-gram lengths to look up, longest first.
    model: for "draft_model", the checkpoint's directory or Hub id.

    Raises:
        RequestError: a value is invalid, or does not fit the method.
    """

    method: str = NGRAM
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(
                f"speculative decoding by {self.method!r} was asked for, but {' and '.join(METHODS)} are known: use "
                "one of them."
            )
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(
                    f"{name} of speculative decoding is {value!r}, but a whole number, 1 or more, is needed: correct "
                    "it."
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise RequestError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, but prompt_lookup_max is {self.prompt_lookup_max}: "
                "lower the one or raise the other."
            )
        if self.method == DRAFT_MODEL and not self.model:
            raise RequestError(
                "speculative decoding by a draft model was asked for, but none was named: pass its checkpoint as model."
            )
        if self.method == NGRAM and self.model:
            raise RequestError(
                f"speculative decoding by n-grams needs no model, but {self.model!r} was given: leave it out, or set "
                f"method to {DRAFT_MODEL!r}."
            )


def speculative_config(asked: Any) -> SpeculativeConfig:
    """Convert `asked` to a `SpeculativeConfig`. It may be one already, a mapping of its fields or its JSON, "ngram", or
    a checkpoint; a suffix ":4" to the last two sets the number of draft tokens.

    Raises:
        RequestError: `asked` has another form or invalid values.
    """
    if isinstance(asked, SpeculativeConfig):
        return asked
    if isinstance(asked, str) and asked.startswith("{"):
        try:
            asked = json.loads(asked)
        except ValueError as error:
            raise RequestError(f"speculative is {asked}, which is not JSON ({error}): correct it.") from error
    if isinstance(asked, Mapping):
        known = [field.name for field in fields(SpeculativeConfig)]
        unknown = [str(name) for name in asked if name not in known]
        if unknown:
            raise RequestError(
                f"speculative was given {', '.join(unknown)}, but it takes {', '.join(known)}: correct it."
            )
        values = dict(asked)
        if values.get("model") and "method" not in values:
            values["method"] = DRAFT_MODEL
        return SpeculativeConfig(**values)
    if isinstance(asked, str) and asked:
        name, colon, count = asked.rpartition(":")
        numbered = bool(name and colon and count.isdigit())
        what = name if numbered else asked
        values = {"num_speculative_tokens": int(count)} if numbered else {}
        values |= {"method": NGRAM} if what == NGRAM else {"method": DRAFT_MODEL, "model": what}
        return SpeculativeConfig(**values)
    raise RequestError(
        f"speculative is {asked!r}, but it takes {NGRAM!r}, a checkpoint, or a mapping such as "
        '{"method": "ngram", "num_speculative_tokens": 4}: correct it.'
    )
