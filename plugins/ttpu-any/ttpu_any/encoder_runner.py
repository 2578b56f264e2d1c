"""Serves a text encoder for embeddings: the `ttpu_serve.runner.ModelRunner` of models that generate nothing. The
prompts of a step are padded to a few widths, and those of one width run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_any.base_runner import BaseRunner, default_sequences, widths_of
from ttpu_any.encoder_programs import EncoderPrograms
from ttpu_any.sharding import batch_sharding
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.slot_sampler import SampledRows, named
from ttpu_jax.runner.stats import Limits, MemoryStats

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import RunnerStep

BATCH_TOKENS = 4096
"""Tokens of the largest batch, padding included, where nothing is said."""


@dataclass(frozen=True)
class Batch:
    """Hidden states [rows, width, hidden] on the device, and the sequences of the step that the first rows hold."""

    states: jax.Array
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class InFlight:
    """A dispatched step.

    Attributes:
        batches: in which every sequence is once.
        counts: tokens of each sequence.
        rows: that the engine reads tokens of, and are not used.
    """

    batches: tuple[Batch, ...]
    counts: tuple[int, ...]
    rows: int

    def read(self) -> SampledRows:
        """Wait for the step. Nothing is sampled: each token [rows] is 0."""
        jax.block_until_ready([batch.states for batch in self.batches])
        return SampledRows(np.zeros(self.rows, np.int32), None, None, None)

    def read_hidden(self) -> np.ndarray:
        """Hidden states float32 [tokens, hidden] of all sequences, in the step's order."""
        found: dict[int, np.ndarray] = {}
        for batch in self.batches:
            states = np.asarray(batch.states, np.float32)
            for row, sequence in enumerate(batch.sequences):
                found[sequence] = states[row, : self.counts[sequence]]
        return np.concatenate([found[sequence] for sequence in range(len(self.counts))])


class EncoderRunner(BaseRunner):
    """The device side of an engine for a text encoder."""

    def __init__(self, programs: EncoderPrograms, config: EngineConfig) -> None:
        """
        Args:
            programs: of the loaded model.
            config: the engine's settings, as the caller gave them.

        Raises:
            RequestError: settings that need pages, or that contradict the model.
        """
        super().__init__(programs.params, programs.placement, config)
        self.programs = programs
        length = config.max_model_len or programs.context
        sequences = config.max_num_seqs or default_sequences(self.placement.platform)
        tokens = max(config.max_num_batched_tokens or BATCH_TOKENS, length)
        self.config = config.filled(
            programs.context, max_num_seqs=sequences, max_num_batched_tokens=tokens, page_size=length
        )
        self.widths = widths_of(length, config.token_buckets)
        self.limits = Limits(
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            max_prefills=None,
            draft_tokens=0,
            page_size=length,
            recurrent=True,  # no cached prefixes
            vocab_size=programs.vocab_size,
            logit_columns=programs.vocab_size,
            sampling_level=config.sampling_level,
            penalties=False,
            prompt_logprobs=False,
            max_logprobs=0,
            whole_prompts=True,
            generates=False,
        )

    def memory_stats(self) -> MemoryStats:
        """The bytes of the weights; nothing is cached."""
        return MemoryStats(self.weight_bytes, 0.0)

    def rows_of(self, width: int) -> int:
        """Prompts that run together in the larger program of a width."""
        return max(1, min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens // width))

    def dispatch(self, step: RunnerStep) -> InFlight:
        """Send a step to the device; returns at once."""
        ends = np.cumsum(step.counts)
        prompts = [step.tokens[end - count : end] for end, count in zip(ends, step.counts, strict=True)]
        batches = tuple(self._encode(width, chosen, prompts) for width, chosen in self._batches(step.counts))
        return InFlight(batches, tuple(step.counts.tolist()), len(step.rows))

    def _batches(self, counts: np.ndarray) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The sequences of each batch, and its width."""
        places = np.searchsorted(self.widths, counts)
        for place in np.unique(places).tolist():
            width = self.widths[place]
            same, rows = np.flatnonzero(places == place).tolist(), self.rows_of(width)
            for first in range(0, len(same), rows):
                yield width, tuple(same[first : first + rows])

    def _encode(self, width: int, chosen: tuple[int, ...], prompts: Sequence[np.ndarray]) -> Batch:
        rows = 1 if len(chosen) == 1 else self.rows_of(width)
        given = np.zeros((2, rows, width), np.int32)
        given[0] = self.programs.pad
        given[1, len(chosen) :, 0] = 1  # a row without real tokens may give what is not a number
        for row, sequence in enumerate(chosen):
            prompt = prompts[sequence]
            given[0, row, : len(prompt)], given[1, row, : len(prompt)] = prompt, 1
        program = self.pool.get(("encode", rows, width), partial(self._program, rows, width))
        tokens, mask = (jax.device_put(each, self._where(rows)) for each in given)
        return Batch(program(self.params, tokens, mask), chosen)

    def programs_ahead(self) -> Iterable[Program]:
        """For each width one program for a single prompt and one for many."""
        for width in reversed(self.widths):
            for rows in sorted({1, self.rows_of(width)}):
                yield self._program(rows, width)

    def _program(self, rows: int, width: int) -> Program:
        traced = self.programs.traced(rows, width)

        def encode(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            return traced(params, tokens, mask)[0]

        given = jax.ShapeDtypeStruct((rows, width), jnp.int32, sharding=self._where(rows))
        return Program(
            ("encode", rows, width), named(encode, "encode"), (self.abstract_params(), given, given), (), None
        )

    def _where(self, rows: int) -> jax.sharding.Sharding:
        return batch_sharding(self.placement, rows, 2)
