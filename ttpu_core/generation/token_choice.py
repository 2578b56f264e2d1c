"""The parameters that choose the next token, for every way of generating, checked once."""

from __future__ import annotations

import numbers
import secrets
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ttpu_core.errors import RequestError

MIN_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy: its logits, divided by less, would leave float32's range."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SEEDS = 2**32


@dataclass(frozen=True)
class TokenChoice:
    """How one request wants its tokens chosen.

    temperature: 0 (or less than MIN_TEMPERATURE) is greedy. top_k: number of tokens, 0 is off. top_p, min_p:
    probabilities; 1 and 0 are off. repetition_penalty: 1 is off (Keskar et al. 2019, arXiv:1909.05858).
    presence_penalty, frequency_penalty: in logits, 0 is off, as OpenAI's API defines them.
    seed: None draws one from the operating system. logprobs: None for none, 0 for the chosen token's, n for
    the n likeliest tokens' as well.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Refuse the first value that is not a number or is out of range.

        Raises:
            RequestError: there is one.
        """
        _check("temperature", self.temperature, "a finite number, 0 or more (0 is greedy)", low=0)
        _check("top_k", self.top_k, "a whole number, 0 or more (0 is off)", low=0, whole=True)
        _check("top_p", self.top_p, "above 0 and at most 1 (1 is off)", low=0, high=1, above=True)
        _check("min_p", self.min_p, "from 0 to 1 (0 is off)", low=0, high=1)
        _check("repetition_penalty", self.repetition_penalty, "above 0 (1 is off)", low=0, above=True)
        _check("presence_penalty", self.presence_penalty, "from -2 to 2 (0 is off)", low=-2, high=2)
        _check("frequency_penalty", self.frequency_penalty, "from -2 to 2 (0 is off)", low=-2, high=2)
        if self.seed is not None:
            allowed = "None or a whole number from 0 to 2**32 - 1"
            _check("seed", self.seed, allowed, low=0, high=_SEEDS - 1, whole=True)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, "None or a whole number, 0 or more", low=0, whole=True)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def with_seed(self) -> Self:
        """Itself if it has a seed, otherwise a copy with a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(_SEEDS))


def _check(
    name: str,
    value: object,
    allowed: str,
    *,
    low: float,
    high: float = _FLOAT32_MAX,
    above: bool = False,
    whole: bool = False,
) -> None:
    """Raises RequestError unless `value` is a number in [low, high], or with `above` in (low, high]."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool | np.bool_) or not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}, of type {type(value).__name__}: it must be {allowed}")
    number: float = value  # type: ignore[assignment]
    if not low <= number <= high or (above and number == low):  # NaN compares false
        raise RequestError(f"{name} is {value!r}: it must be {allowed}")
