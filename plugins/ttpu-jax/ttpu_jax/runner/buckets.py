"""The shapes that an engine compiles its steps for. `buckets_for` derives them from the engine's limits, and
`Buckets.step` chooses the smallest that holds a step. No other shape ever runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ttpu_core.errors import RequestError

SMALLEST_TOKENS = 16


@dataclass(frozen=True, order=True)
class StepShape:
    """The sizes of a compiled step.

    Attributes:
        tokens: number of tokens.
        sequences: the most sequences.
        rows: the most tokens whose logits are computed.
        max_queries: the most tokens of one sequence.
        max_prefills: the most sequences with more than one token.
    """

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
    """All step shapes of an engine.

    Attributes:
        sequences: ascending sizes of steps that only decode.
        mixed_sequences: ascending numbers of sequences of steps that also prefill.
        tokens: ascending numbers of tokens of steps that also prefill.
        draft: draft tokens that are verified per sequence; 0 without speculation.
        max_prefills: the most prompts per step; None for any number.
    """

    sequences: tuple[int, ...]
    mixed_sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    draft: int = 0
    max_prefills: int | None = None

    def step(self, num_tokens: int, num_sequences: int, most: int) -> StepShape:
        """Return the smallest shape for a step of `num_tokens` tokens of `num_sequences` sequences, one of which has
        `most` tokens.

        Raises:
            RequestError: no shape is large enough. A scheduler with the engine's limits never asks for such a step.
        """
        if most == 1:
            return self._decode(_smallest(self.sequences, num_sequences, "sequences"))
        if most <= self.draft + 1:
            return self._verify(_smallest(self.sequences, num_sequences, "sequences"))
        sequences = _smallest(self.mixed_sequences, num_sequences, "sequences")
        return self._mixed(_smallest(self.tokens, num_tokens, "tokens"), sequences)

    def holding(self, needed: StepShape) -> tuple[StepShape, ...]:
        """Return every shape that could hold a step, smallest first.

        Args:
            needed: what the step has of each.
        """
        return tuple(
            shape
            for shape in reversed(self.all())
            if shape.tokens >= needed.tokens
            and shape.sequences >= needed.sequences
            and shape.rows >= needed.rows
            and shape.max_queries >= needed.max_queries
            and shape.max_prefills >= needed.max_prefills
        )

    def first(self) -> tuple[StepShape, StepShape]:
        """Return the shapes with which an engine can begin to serve: one that holds any step, and the smallest one."""
        largest = self._mixed(self.tokens[-1], self.mixed_sequences[-1])
        return largest, self._decode(self.sequences[0])

    def all(self) -> tuple[StepShape, ...]:
        """Return every shape, largest first, because the largest determines the memory that programs need."""
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
    max_model_len: int | None = None,
    draft: int = 0,
    max_prefills: int | None = None,
    sequences: Iterable[int] | None = None,
    tokens: Iterable[int] | None = None,
    factor: int = 4,
) -> Buckets:
    """Choose the step shapes of an engine. Each additional size costs a compilation and saves some padding.

    Args:
        max_num_seqs: the most sequences of a step.
        max_num_batched_tokens: the most tokens of a step.
        max_model_len: the most tokens of a sequence, so that a step has no more than all sequences together; None for
            any number.
        draft: draft tokens that are verified per sequence; 0 without speculation.
        max_prefills: the most prompts per step; None for any number.
        sequences: sizes of steps that only decode; None for `max_num_seqs` divided by `factor` again and again.
        tokens: numbers of tokens of steps that also prefill; None for `max_num_batched_tokens` divided by `factor`
            again and again. These steps are compiled for `max_num_seqs` sequences only.
        factor: the ratio of one size to the next smaller one.
    """
    seqs = tuple(sorted({*(sequences or _powers(1, max_num_seqs, factor)), max_num_seqs}))
    most = max_num_batched_tokens
    if max_model_len is not None:
        prompts = max_num_seqs if max_prefills is None else min(max_num_seqs, max_prefills)
        most = min(most, prompts * max_model_len + (max_num_seqs - prompts) * (draft + 1))
    smallest = min(SMALLEST_TOKENS, most)
    sizes = tuple(sorted({*(size for size in tokens or _powers(smallest, most, factor) if size < most), most}))
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
