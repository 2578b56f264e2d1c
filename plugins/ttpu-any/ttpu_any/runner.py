"""Serves a stock model: the `ttpu_serve.runner.ModelRunner` of models that no plugin describes. Each request slot has a
static cache of its own, as long as a sequence may be. A prompt is read at once into its slot; one program decodes one
token for all slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_any.aten.table import NEEDS_PLUGIN, jax_dtype
from ttpu_any.base_runner import SMALLEST_WIDTH, BaseRunner, default_sequences, refuse, widths_of
from ttpu_any.programs import StockPrograms
from ttpu_any.sharding import slot_sharding
from ttpu_any.steps import Prefill
from ttpu_any.trace import Traced
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_jax.ops.sampling import Sampled
from ttpu_jax.params.placement import device_bytes
from ttpu_jax.runner.batch import IN_FLIGHT, put_whole
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.memory import GIB, free_bytes
from ttpu_jax.runner.slot_sampler import SampledRows, SlotSampler, named, read_rows
from ttpu_jax.runner.stats import Limits, MemoryStats, first_device

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import ModelRunner, RunnerStep

FREE_SHARE = 0.8
"""Of the free memory, what caches may take; the programs' temporaries need the rest."""


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose rows are at `places` among those that were sampled."""

    sampled: Sampled
    places: np.ndarray

    def read(self) -> SampledRows:
        """Wait for the step, and return what its rows sampled."""
        return read_rows(self.sampled, self.places)

    def read_hidden(self) -> np.ndarray:
        """Refused, instead of [tokens, hidden]: the model's code returns logits.

        Raises:
            RequestError: always.
        """
        refuse("hidden states were asked for")


class StockRunner(BaseRunner):
    """The device side of an engine for a stock decoder."""

    def __init__(self, programs: StockPrograms, params: dict[str, jax.Array], config: EngineConfig) -> None:
        """
        Args:
            programs: of the loaded model, whose manner is known.
            params: name → array.
            config: the engine's settings, as the caller gave them.

        Raises:
            UnsupportedError: the model cannot be padded, or keeps no cache.
            RequestError: settings that need pages, or that contradict the model or each other.
        """
        if not programs.manner.pads:
            raise UnsupportedError(
                f"{type(programs.steps.model).__name__} was to be served, but it computes something else for padded "
                f"prompts, so that each length of a prompt would need programs of its own{NEEDS_PLUGIN}"
            )
        if not programs.manner.cache:
            raise UnsupportedError(
                f"{type(programs.steps.model).__name__} was to be served, but its cache cannot be kept, so that each "
                f"token would read the whole text again{NEEDS_PLUGIN}"
            )
        if config.max_num_batched_tokens is not None:
            refuse(f"max_num_batched_tokens={config.max_num_batched_tokens!r} was given")
        super().__init__(params, programs.placement, config)
        self.programs = programs
        self.rows = programs.manner.rows
        platform = self.placement.platform
        context, asked = programs.spec.context, config.max_num_seqs
        length = config.max_model_len or context
        sequences = asked or default_sequences(platform)
        self.config = config.filled(
            context, max_num_seqs=sequences, max_num_batched_tokens=length + sequences, page_size=length
        )
        self.widths = widths_of(length, config.token_buckets)
        fits = self._fitting(length)
        if fits < (asked or 1):
            raise RequestError(
                f"{asked or 1} sequences of {length:,} tokens need {(asked or 1) * self.slot_bytes / GIB:.2f} GiB for "
                f"their caches on each device, but {fits * self.slot_bytes / GIB:.2f} GiB are free for them: lower "
                "max_num_seqs or max_model_len, or use more devices."
            )
        sequences = min(sequences, fits)
        self.config = config.filled(
            context, max_num_seqs=sequences, max_num_batched_tokens=length + sequences, page_size=length
        )
        vocabulary = programs.spec.vocab_size
        self.limits = Limits(
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=length + sequences,
            max_prefills=None,
            draft_tokens=0,
            page_size=length,
            recurrent=True,  # no cached prefixes
            vocab_size=vocabulary,
            logit_columns=vocabulary,
            sampling_level=config.sampling_level,
            penalties=self.config.penalties,
            prompt_logprobs=False,
            max_logprobs=min(config.max_logprobs, vocabulary),
            whole_prompts=True,
            hidden_states=False,
        )
        self.sampler = SlotSampler(self.placement, self.config, vocabulary, vocabulary)
        self._starts = np.zeros(sequences, np.int32)
        self._caches: tuple[jax.Array, ...] = ()
        self._logits: jax.Array | None = None

    # -- what it is --

    @property
    def slots(self) -> int:
        """Slots of one cache: a sequence, and the padding before its prompt."""
        padding = [wide - narrow - 1 for narrow, wide in zip((0, *self.widths), self.widths, strict=False)]
        return self.widths[-1] + max(padding)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes on each device of one request slot, if rows are not spread over devices."""
        return device_bytes(self._abstract_caches(1))

    def memory_stats(self) -> MemoryStats:
        """The bytes of the weights, and of one number of a cached key or value."""
        kept = max(self._first.cache, key=lambda each: prod(each.shape))
        return MemoryStats(self.weight_bytes, jax_dtype(kept.dtype).dtype.itemsize)

    # -- its life --

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        """Make the caches of all slots. `num_pages`: not used; a draft is never given."""
        super().allocate(num_pages, draft=draft)
        self._caches, self._logits = (
            jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype, device=each.sharding), abstract)
            for abstract in (self._abstract_caches(self.limits.max_num_seqs), self._abstract_logits())
        )
        self.sampler.state = self.sampler.empty_state(abstract=False)

    def release(self) -> None:
        """Free the memory of the caches; their contents are lost."""
        for leaf in jax.tree.leaves((self._caches, self._logits, self.sampler.state)):
            leaf.delete()
        self._caches, self._logits = (), None

    # -- steps --

    def dispatch(self, step: RunnerStep) -> InFlight:
        """Send a step to the device; returns at once."""
        for start in step.begins:
            self.sampler.begin(start, self.pool)
        ends = np.cumsum(step.counts)
        decoding = np.full(self.limits.max_num_seqs, False)
        tokens = np.zeros(self.limits.max_num_seqs, np.int32)
        positions = np.zeros(self.limits.max_num_seqs, np.int32)
        for slot, first, count, end in zip(step.slots, step.starts, step.counts, ends, strict=True):
            own = step.tokens[end - count : end]
            if first == 0:
                self._read(int(slot), own)
                continue
            assert count == 1, "a prompt is read at once"
            decoding[slot], tokens[slot], positions[slot] = True, own[0], first
        if decoding.any():
            vector = np.stack([decoding.astype(np.int32), tokens, self._starts, self._starts + positions])
            program = self.pool.get("decode", self._decode_program)
            self._caches, self._logits = program(
                self.params, self._caches, self._logits, self.sampler.state.last_tokens, self._put(vector)
            )
        assert self._logits is not None
        places = step.slots[step.owners]
        sampled = self.sampler.sample(step, self.limits.max_num_seqs, self._logits, self.pool, places)
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        return InFlight(sampled, places)

    def _read(self, slot: int, tokens: np.ndarray) -> None:
        """Read a whole prompt into a slot."""
        width = next(each for each in self.widths if each >= len(tokens))
        start = width - len(tokens)
        self._starts[slot] = start
        vector = np.zeros(width + 2, np.int32)
        vector[0], vector[1], vector[2 + start :] = slot, start, tokens
        program = self.pool.get(("prefill", width), partial(self._prefill_program, width))
        self._caches, self._logits = program(
            self.params, self._caches, self._logits, self.sampler.state.last_tokens, self._put(vector)
        )

    def _put(self, vector: np.ndarray) -> jax.Array:
        return put_whole(vector, self.placement.whole())

    # -- programs --

    def programs_ahead(self) -> Iterable[Program]:
        """A prefill for each width, the decode step, and the sampler's."""
        yield from (self._prefill_program(width) for width in reversed(self.widths))
        yield self._decode_program()
        yield from self.sampler.programs([self.limits.max_num_seqs])

    def _prefill_program(self, width: int) -> Program:
        traced = self._traced_prefill(width).program

        def prefill(params: Any, caches: Any, logits: Any, last: jax.Array, vector: jax.Array) -> Any:
            slot, start, tokens = vector[0], vector[1], vector[2:]
            tokens = jnp.where(tokens == IN_FLIGHT, last[slot], tokens)
            found, *cache = traced(params, jnp.tile(tokens, (self.rows, 1)), jnp.full(self.rows, start))
            caches = tuple(
                jax.lax.dynamic_update_index_in_dim(whole, each.astype(whole.dtype), slot, 0)
                for whole, each in zip(caches, cache, strict=True)
            )
            return caches, jax.lax.dynamic_update_index_in_dim(logits, self._row(found), slot, 0)

        return self._program(("prefill", width), prefill, (width + 2,))

    def _decode_program(self) -> Program:
        traced, grows = self._decode, self._grows

        def decode(params: Any, caches: Any, logits: Any, last: jax.Array, vector: jax.Array) -> Any:
            active, tokens, start, length = vector
            tokens = jnp.where(tokens == IN_FLIGHT, last[:-1], tokens)

            def one(token: jax.Array, start: jax.Array, length: jax.Array, cache: Any) -> Any:
                given = jnp.full((self.rows, 1), token), jnp.full(self.rows, start), length
                found, *after = traced(params, *given, *cache)
                return self._row(found), tuple(after)

            found, after = jax.vmap(one)(tokens, start, length, caches)

            def kept(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where((active > 0).reshape(-1, *(1,) * (old.ndim - 1)), new.astype(old.dtype), old)

            # What a slot that rests writes behind its tokens is overwritten by its next one.
            caches = tuple(
                new if grow else kept(new, old) for new, old, grow in zip(after, caches, grows, strict=True)
            )
            return caches, kept(found, logits)

        return self._program("decode", decode, (4, self.limits.max_num_seqs))

    def _program(self, key: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> Program:
        """The program of (parameters, caches, logits, last tokens, a vector of integers) → caches and logits."""
        held = self._abstract_caches(self.limits.max_num_seqs), self._abstract_logits()
        vector = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placement.whole())
        last = self.sampler.empty_state(abstract=True).last_tokens
        shardings = jax.tree.map(lambda each: each.sharding, held)
        name = key if isinstance(key, str) else key[0]
        return Program(key, named(function, name), (self.abstract_params(), *held, last, vector), (1, 2), shardings)

    def _row(self, logits: jax.Array) -> jax.Array:
        return logits[-1, : self.limits.vocab_size].astype(jnp.float32)

    # -- the model's calls, and what they keep --

    def _traced_prefill(self, width: int) -> Prefill:
        found = self.programs.steps.prefill(self.rows, width, self.slots)
        if (found.skeleton, found.cache) != (self._first.skeleton, self._first.cache):
            raise UnsupportedError(
                f"the cache of {type(self.programs.steps.model).__name__} depends on the length of the prompt, so that "
                f"one program could not decode after all{NEEDS_PLUGIN}"
            )
        return found

    @cached_property
    def _first(self) -> Prefill:
        return self.programs.steps.prefill(self.rows, self.widths[0], self.slots)

    @cached_property
    def _decode(self) -> Traced:
        return self.programs.steps.decode(self._first, self.rows, self.slots)

    @cached_property
    def _grows(self) -> tuple[bool, ...]:
        """Whether each tensor of the cache has a place for each token."""
        longer = self.programs.steps.prefill(self.rows, self.widths[0], self.slots + SMALLEST_WIDTH)
        return tuple(one.shape != other.shape for one, other in zip(self._first.cache, longer.cache, strict=True))

    def _abstract_caches(self, count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(
                (count, *each.shape), jax_dtype(each.dtype), sharding=slot_sharding(self.placement, count, each.shape)
            )
            for each in self._first.cache
        )

    def _abstract_logits(self) -> jax.ShapeDtypeStruct:
        return self.sampler.logits(self.limits.max_num_seqs)

    def _fitting(self, length: int) -> int:
        """How many slots the free memory has room for."""
        free = self.config.kv_cache_memory
        if free is None:
            share = self.config.memory_utilization
            free = int(FREE_SHARE * free_bytes(first_device(self.placement), 0, share))
        return free // max(self.slot_bytes, 1)
