"""The few shapes in which steps are compiled. In: limits of the engine; out: the shapes, and the smallest that holds a
step. Whatever requests come, the device only ever sees these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ttpu_core.errors import RequestError

SMALLEST_TOKENS = 16


@dataclass(frozen=True, order=True)
class StepShape:
    """A compiled step's sizes: `tokens` of up to `sequences`, the logits of `rows` of them, at most `max_queries`
    tokens of one sequence, and at most `max_prefills` sequences with more than one."""

    tokens: int
    sequences: int
    rows: int
    max_queries: int
    max_prefills: int

    def __str__(self) -> str:
        kind = "decode" if self.max_queries == 1 else "verify" if self.max_queries < SMALLEST_TOKENS else "mixed"
        return f"{kind} {self.tokens} tokens × {self.sequences} sequences"


@dataclass(frozen=True)
class Buckets:
    """Every shape of an engine.

    sequences: sizes for steps that only decode, ascending. mixed_sequences: those for steps that also prefill.
    tokens: sizes for steps that also prefill, ascending. draft: tokens that are verified per sequence, 0 without
    speculation. max_prefills: prompts per step, None for any number.
    """

    sequences: tuple[int, ...]
    mixed_sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    draft: int = 0
    max_prefills: int | None = None

    def step(self, num_tokens: int, num_sequences: int, most: int) -> StepShape:
        """The smallest shape for a step of so many tokens and sequences, one of which has `most` tokens.

        Raises:
            RequestError: there is none, which a scheduler with the same limits never asks for.
        """
        if most == 1:
            return self._decode(_smallest(self.sequences, num_sequences, "sequences"))
        if most <= self.draft + 1:
            return self._verify(_smallest(self.sequences, num_sequences, "sequences"))
        sequences = _smallest(self.mixed_sequences, num_sequences, "sequences")
        return self._mixed(_smallest(self.tokens, num_tokens, "tokens"), sequences)

    def all(self) -> tuple[StepShape, ...]:
        """Every shape, largest first: the largest says how much memory programs need."""
        shapes = {self._decode(sequences) for sequences in self.sequences}
        if self.draft:
            shapes |= {self._verify(sequences) for sequences in self.sequences}
        several = [tokens for tokens in self.tokens if tokens > 1]
        shapes |= {self._mixed(tokens, sequences) for tokens in several for sequences in self.mixed_sequences}
        return tuple(sorted(shapes, reverse=True))

    def _decode(self, sequences: int) -> StepShape:
        return StepShape(sequences, sequences, sequences, 1, 0)

    def _verify(self, sequences: int) -> StepShape:
        tokens = sequences * (self.draft + 1)
        return StepShape(tokens, sequences, tokens, self.draft + 1, sequences)

    def _mixed(self, tokens: int, sequences: int) -> StepShape:
        prefills = sequences if self.max_prefills is None else min(sequences, self.max_prefills)
        # Each row is of a token of its own. Of sizes that other steps have: each costs a compilation per sampler.
        needed = min(sequences * (self.draft + 1), tokens)
        sizes = {size * count for size in self.sequences for count in (1, self.draft + 1)}
        rows = min((size for size in sizes if size >= needed), default=needed)
        return StepShape(tokens, sequences, rows, tokens, prefills)


def buckets_for(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    draft: int = 0,
    max_prefills: int | None = None,
    sequences: Iterable[int] | None = None,
    tokens: Iterable[int] | None = None,
    factor: int = 4,
) -> Buckets:
    """The limits, and sizes smaller by `factor` again and again, unless sizes are given; steps that also prefill are
    made for all sequences. Each size more costs a compilation, each size less some padding."""
    seqs = tuple(sorted({*(sequences or _powers(1, max_num_seqs, factor)), max_num_seqs}))
    smallest = min(SMALLEST_TOKENS, max_num_batched_tokens)
    sizes = tuple(sorted({*(tokens or _powers(smallest, max_num_batched_tokens, factor)), max_num_batched_tokens}))
    return Buckets(seqs, seqs[-1:], sizes, draft, max_prefills)


def _powers(first: int, last: int, factor: int) -> list[int]:
    sizes = [last]
    while sizes[-1] // factor >= first:
        sizes.append(sizes[-1] // factor)
    return sizes


def _smallest(sizes: tuple[int, ...], needed: int, what: str) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise RequestError(f"a step of {needed} {what} was asked for, but the engine was built for at most {sizes[-1]}.")
