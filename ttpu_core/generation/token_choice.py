"""The parameters that choose the next token, for every way of generating, checked once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Self

from ttpu_core.generation.ranges import SEEDS, check

MIN_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy: its logits, divided by less, would leave float32's range."""


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
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"):  # fmt: skip
            check(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                check(name, getattr(self, name))

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
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(SEEDS))
