"""The sampling side of a runner: what each request slot asked for, the sampler's programs, and its state on the device.
It takes a step and the logits of its rows, and gives the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.generation.sampling_params import MAX_LOGIT_BIAS
from ttpu_core.spec import axes
from ttpu_jax.ops.sampling import LogitRules, Sampled, TokenCounts
from ttpu_jax.params.placement import Placement
from ttpu_jax.runner.batch import put_whole
from ttpu_jax.runner.compilation import Program, ProgramPool
from ttpu_jax.runner.sampler import FIELDS, NEUTRAL, Level, SamplerState, begin_slot, column, empty_rules, sample_rows

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import RowRules, RunnerStep, SlotStart


@dataclass(frozen=True)
class SampledRows:
    """Tokens [rows], and log-probabilities where some row's level has them; names are `Sampled`'s."""

    token: np.ndarray
    logprob: np.ndarray | None
    top_tokens: np.ndarray | None
    top_logprobs: np.ndarray | None


def read_rows(sampled: Sampled, rows: Any) -> SampledRows:
    """Wait for a step, and return what some of its rows sampled. `rows`: a slice, or indices."""

    def host(value: jax.Array | None) -> np.ndarray | None:
        return None if value is None else np.asarray(value)[rows]

    token = np.asarray(sampled.token)[rows]
    return SampledRows(token, host(sampled.logprob), host(sampled.top_tokens), host(sampled.top_logprobs))


class SlotSampler:
    """Samples the rows of an engine's steps by request slot.

    Attributes:
        vocab: columns of the logits.
        max_logprobs: how many of the likeliest tokens are reported beside a chosen one.
        prompts: int32 [slots], the length of each slot's prompt.
        state: on the device; `allocate` makes it.
    """

    state: SamplerState

    def __init__(self, placement: Placement, config: EngineConfig, vocab: int, vocab_size: int) -> None:
        """
        Args:
            placement: of the model.
            config: as `EngineConfig.filled` gives it.
            vocab: columns of the logits.
            vocab_size: tokens among them.
        """
        assert config.max_num_seqs and config.max_model_len
        self.placement, self.vocab = placement, vocab
        self.max_logprobs = min(config.max_logprobs, vocab_size)
        self.highest_level = Level[config.sampling_level.upper()]
        self.prompts = np.zeros(config.max_num_seqs + 1, np.int32)
        self._no_slot, self._length, self._penalties = config.max_num_seqs, config.max_model_len, config.penalties
        self._whole = placement.whole()
        self._columns = np.repeat(NEUTRAL[:, None], self._no_slot + 1, axis=1)
        self._levels = np.zeros(self._no_slot + 1, np.int8)
        self._no_rules: dict[int, LogitRules] = {}

    # -- programs --

    def programs(self, rows: Iterable[int]) -> Iterable[Program]:
        """Every program, for steps with these numbers of rows."""
        for count in rows:
            yield from (self.program(count, level) for level in Level if level <= self.highest_level)
        if self._penalties:
            yield self._begin_program()

    def first_programs(self, rows: Iterable[int]) -> set[Hashable]:
        """Keys of the programs that can sample these numbers of rows in any way."""
        begin: set[Hashable] = {"begin_slot"} if self._penalties else set()
        return begin | {("sample", count, self.highest_level) for count in rows}

    def program(self, rows: int, level: Level) -> Program:
        """The program that samples so many rows."""
        state, rules = self.empty_state(abstract=True), None
        if level is Level.ALL:
            nothing = empty_rules(1, self.vocab, MAX_LOGIT_BIAS)
            rules = LogitRules(*(self._abstract((rows, *each.shape[1:]), each.dtype) for each in nothing))
        function = partial(sample_rows, level=level, max_logprobs=self.max_logprobs)
        arguments = (self.logits(rows), state, self._abstract((len(NEUTRAL), rows), jnp.int32), rules)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state), self._whole
        return Program(("sample", rows, level), named(function, "sample_rows"), arguments, (1,), shardings)

    def _begin_program(self) -> Program:
        state = self.empty_state(abstract=True)
        tokens = self._abstract((self._length,), jnp.int32)
        arguments = (state, self._abstract((), jnp.int32), tokens, tokens)
        return Program("begin_slot", begin_slot, arguments, (0,), jax.tree.map(lambda leaf: leaf.sharding, state))

    def logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """The logits of so many rows: shape, dtype and sharding."""
        shape = (rows, self.vocab)
        sharding = self.placement.sharding(self.placement.divisible((None, axes.VOCAB), shape), shape, "logits")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def empty_state(self, *, abstract: bool) -> SamplerState:
        """The state before the first request."""
        slots, placement = self._no_slot + 1, self.placement

        def make(shape: tuple[int, ...], dtype: Any, logical: tuple[str | None, ...]) -> Any:
            sharding = placement.sharding(placement.divisible(logical, shape), shape, "sampling state")
            if abstract:
                return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            return jnp.zeros(shape, dtype, device=sharding)

        counts = None
        if self._penalties:
            shape, logical = (slots, self.vocab), (None, axes.VOCAB)
            counts = TokenCounts(make(shape, jnp.bool_, logical), make(shape, jnp.int32, logical))
        return SamplerState(make((slots,), jnp.int32, (None,)), counts)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    # -- steps --

    def begin(self, start: SlotStart, pool: ProgramPool) -> None:
        """Note what a request asks for where its slot's rows are made from."""
        slot = start.slot
        self._columns[:, slot] = column(start.params, slot)
        self._levels[slot] = start.level
        self.prompts[slot] = start.prompt_length
        if start.prompt is not None and start.output is not None:
            prompt, output = np.full(self._length, -1, np.int32), np.full(self._length, -1, np.int32)
            prompt[: len(start.prompt)] = start.prompt
            output[: len(start.output)] = start.output
            program = pool.get("begin_slot", self._begin_program)
            put = partial(put_whole, sharding=self._whole)
            self.state = program(self.state, put(np.asarray(slot, np.int32)), put(prompt), put(output))

    def sample(
        self, step: RunnerStep, rows: int, logits: jax.Array, pool: ProgramPool, places: np.ndarray | None = None
    ) -> Sampled:
        """Sample a step's rows.

        Args:
            step: the step.
            rows: of the logits, at least as many as the step has.
            logits: [rows, vocab].
            pool: of compiled programs.
            places: int [step rows], the row of the logits of each of the step's rows; None takes the first ones in
                order.
        """
        owners, count = step.owners, len(step.owners)
        places = np.arange(count) if places is None else places
        slots = step.slots[owners]
        requests = np.repeat(NEUTRAL[:, None], rows, axis=1)
        requests[FIELDS["slot"]] = self._no_slot
        requests[:, places] = self._columns[:, slots]
        begins = np.cumsum(step.counts) - step.counts
        positions = step.starts[owners] + step.rows - begins[owners]
        requests[FIELDS["step"], places] = positions + 1 - self.prompts[slots]
        samples = step.samples[owners]
        lone = samples if count == len(step.slots) else samples & (np.bincount(owners)[owners] == 1)
        # Of several rows of one request the host says which count, so none is left for the next step to find.
        requests[FIELDS["slot"], places] = np.where(lone, slots, self._no_slot)
        levels = self._levels[slots][samples]
        level = Level(int(levels.max())) if len(levels) else Level.GREEDY
        ready = (each for each in Level if each >= level and pool.has(("sample", rows, each)))
        level = next(ready, level)  # while programs are compiled; each level can do what the lower ones do
        program = pool.get(("sample", rows, level), partial(self.program, rows, level))
        given = None
        if level is Level.ALL:
            given = self._rules(rows, {int(places[row]): rule for row, rule in step.rules.items()})
        put = put_whole(requests, self._whole)
        self.state, sampled = program(logits, self.state, put, given)
        result: Sampled = sampled
        return result

    def _rules(self, rows: int, rules: Mapping[int, RowRules]) -> LogitRules:
        if rows not in self._no_rules:
            self._no_rules[rows] = LogitRules(
                *(put_whole(each, self._whole) for each in empty_rules(rows, self.vocab, MAX_LOGIT_BIAS))
            )
        nothing = self._no_rules[rows]
        if not rules:
            return nothing
        tokens, biases, allowed = empty_rules(rows, self.vocab, MAX_LOGIT_BIAS)
        biased = masked = False
        for row, rule in rules.items():
            if rule.bias is not None:
                size = len(rule.bias[0])
                tokens[row, :size], biases[row, :size], biased = *rule.bias, True
            if rule.allowed is not None:
                allowed[row, : len(rule.allowed)], allowed[row, len(rule.allowed) :], masked = rule.allowed, 0, True
        put = partial(put_whole, sharding=self._whole)
        return LogitRules(
            put(tokens) if biased else nothing.bias_tokens,
            put(biases) if biased else nothing.bias,
            put(allowed) if masked else nothing.allowed,
        )


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under a name that profiles and compiler messages show."""

    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = name
    return run
