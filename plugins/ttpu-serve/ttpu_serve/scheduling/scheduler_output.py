"""What the scheduler is told, and what it says: its settings, the tokens of one step, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.scheduling.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of `Scheduler`.

    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step.
    max_model_len: tokens of one request, prompt and answer. page_size: tokens per page.
    max_waiting: requests that may wait before `add` refuses; None is any number.
    max_prefills: prompts, or parts of prompts, of more than one token in a step; None is any number.
    recurrent: the model keeps states that cannot be cut at a page: no prefix caching, no drafts.
    lookahead: draft tokens per request and step at most.
    aging_seconds: a request that waited so long counts as one priority better; inf never lets priorities meet.
    watermark: share of each pool that admitting a prompt leaves for what runs already, beside a page for each.
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
        """Whether pages are looked up by their content."""
        return self.enable_prefix_caching and not self.recurrent


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """The n rows of one step: first `num_decodes` requests of which only the newest token, and its drafts, are left to
    compute, then parts of prompts.

    starts: int32 [n], position of the first token. counts: int32 [n], tokens, drafts included.
    samples: bool [n], whether a token follows the row's last, or its drafts; for pooling, whether the prompt is whole.
    slots: int32 [n]. drafts: per row the last tokens of its count that are guesses; None where no row has any.
    A token that no host knows yet (its request had `pending` > 0) is the newest of its slot on the device.
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
    """Counters: requests now, page counts per group now, and totals since the start."""

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
