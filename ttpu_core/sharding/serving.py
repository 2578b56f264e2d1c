"""The parts of a serving engine that a plan depends on: its limits, the sizes of its steps, and its memory on a device.
A backend gives the sizes (`ttpu_core.backend.Plans`), because page layouts and compiled shapes are its own."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 128
"""Tokens of a page on a TPU, unless an engine is told otherwise."""

BATCHED_TOKENS = 2048
"""Tokens of an engine's largest step on a TPU, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """An engine's limits: sequences that run at once, tokens of the longest one, tokens of a step, tokens of a page.
    `kv_cache` is int8 or fp8 where keys and values are quantized, else None."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int = PAGE_SIZE
    kv_cache: str | None = None

    @classmethod
    def of(cls, rows: int, context: int, kv_cache: str | None = None) -> ServingLimits:
        """An engine on TPUs for `rows` sequences of up to `context` tokens, whose other limits are the usual ones."""
        return cls(rows, context, max(BATCHED_TOKENS, rows), kv_cache=kv_cache)


@dataclass(frozen=True, slots=True)
class StepSize:
    """A compiled step: `tokens` of up to `sequences` sequences, and the logits of `rows` of the tokens."""

    tokens: int
    sequences: int
    rows: int


@dataclass(frozen=True, slots=True)
class ServedShapes:
    """What an engine compiles and keeps for some limits, in bytes of one device.

    Args:
        decode: the step in which each sequence has one token.
        mixed: the largest step, which also reads prompts.
        cache_bytes: pages for all sequences at their longest, and recurrent states.
        state_bytes: what sampling keeps for each sequence between steps.
    """

    decode: StepSize
    mixed: StepSize
    cache_bytes: int
    state_bytes: int
