"""Which numbers may be asked of decoding: one table for requests, for `generate` and for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from ttpu_core.errors import RequestError

FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
SEEDS = 2**32


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`.

    Args:
        allowed: the same in words, for error messages.
        low: the smallest number, or with `above` a bound that is not reached.
        high: the largest number.
        above: exclude `low` itself.
        whole: allow integers alone.
    """

    allowed: str
    low: float
    high: float = FLOAT32_MAX
    above: bool = False
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is a number in this range; True and False are none."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: float = value  # type: ignore[assignment]
        return self.low <= number <= self.high and not (self.above and number == self.low)  # NaN compares false


RANGES: Mapping[str, Range] = {
    "max_new_tokens": Range("an integer of at least 1", 1, whole=True),
    "max_length": Range("an integer of at least 1", 1, whole=True),
    "temperature": Range("a finite number, 0 or more (0: no sampling)", 0),
    "top_k": Range("a whole number, 0 or more (0: all tokens)", 0, whole=True),
    "top_p": Range("a number above 0 and up to 1 (1: all tokens)", 0, 1, above=True),
    "min_p": Range("a number from 0 to 1 (0: all tokens)", 0, 1),
    "repetition_penalty": Range("a number from 0.001 to 1000 (1: no penalty)", 0.001, 1000),
    "presence_penalty": Range("a number from -2 to 2 (0: no penalty)", -2, 2),
    "frequency_penalty": Range("a number from -2 to 2 (0: no penalty)", -2, 2),
    "seed": Range("a whole number from 0 to 2**32 - 1", 0, SEEDS - 1, whole=True),
    "logprobs": Range("a whole number, 0 or more", 0, whole=True),
}
"""Name of an option → its numbers."""

FILTERS_OFF: Mapping[str, float] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Name of a filter → the number with which it keeps all tokens."""


def check(name: str, value: object) -> None:
    """Refuse a value that is not in the range of its name.

    Raises:
        RequestError: it is no number, or out of range.
    """
    allowed = RANGES[name]
    if not allowed.holds(value):
        raise RequestError(f"{name} is {short(value)}, but it must be {allowed.allowed}: correct it.")


def short(value: object) -> str:
    """A value as errors show it, on one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
