"""Values that the scheduler takes and returns: its settings, the tokens of one step, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.scheduling.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of `Scheduler`.

    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens per step.
    max_model_len: tokens of one request, prompt and output. page_size: tokens per page.
    max_waiting: waiting requests beyond which `add` refuses new ones; None is unlimited.
    max_prefills: prompt parts of more than one token per step; None is unlimited.
    recurrent: the model has recurrent states, so there is no prefix caching and there are no drafts.
    lookahead: maximum draft tokens per request and step.
    aging_seconds: waiting time that counts as one priority level; inf turns aging off.
    watermark: share of each pool that admission leaves to running requests, in addition to a page each.

    Raises:
        RequestError: a value is out of range, or values contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_waiting: int | None = None
    max_prefills: int | None = None
    recurrent: bool = False
    lookahead: int = 0
    aging_seconds: float = 15.0
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size"):
            _at_least(name, getattr(self, name), 1)
        _at_least("lookahead", self.lookahead, 0)
        for name in ("max_waiting", "max_prefills"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not self.aging_seconds > 0:
            raise RequestError(f"aging_seconds is {self.aging_seconds}: it must be more than 0; inf turns aging off.")
        if not 0 <= self.watermark < 1:
            raise RequestError(f"watermark is {self.watermark}: it must be at least 0 and less than 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but {self.max_num_seqs} running requests "
                "decode a token each: raise it, or lower max_num_seqs."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise RequestError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and prompts are not cut into chunks, but one "
                f"may have {self.max_model_len} tokens (max_model_len): raise the one, lower the other, or set "
                "enable_chunked_prefill."
            )
        if self.recurrent and self.lookahead:
            raise RequestError(
                f"lookahead is {self.lookahead}, but a recurrent state cannot take back draft tokens: set it to 0."
            )

    @property
    def caches_prefixes(self) -> bool:
        """Whether the prefix cache is used."""
        return self.enable_prefix_caching and not self.recurrent


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """The n rows of one step: first `num_decodes` requests with only their newest token, and drafts, to compute, then
    prompt parts.

    starts: int32 [n], position of the first token. counts: int32 [n], tokens including drafts.
    samples: bool [n], whether the row samples a token; for pooling, whether the row completes the prompt.
    slots: int32 [n]. drafts: per row the draft tokens, the last of its count; None if no row has any.
    A token that the host does not know yet (its request had `pending` > 0) is the newest of its slot on the device.
    """

    requests: list[Request]
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    slots: np.ndarray
    drafts: list[list[int]] | None
    num_tokens: int
    num_decodes: int
    generations: np.ndarray = field(repr=False)  # of the slots; another one now means that the request left its slot


@dataclass(frozen=True)
class SchedulerStats:
    """Current numbers of requests and pages per group, and totals since the start."""

    waiting: int
    running: int
    preemptions: int
    pages_in_use: tuple[int, ...]
    pages_cached: tuple[int, ...]
    pages_total: tuple[int, ...]
    prefix_query_tokens: int
    prefix_hit_tokens: int


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(f"{name} is {value!r}: it must be a whole number, {low} or more.")
