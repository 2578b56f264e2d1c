"""Runs scheduled steps on the device. In: a `ScheduledStep`; out: a handle whose tokens can be read later, so that the
host schedules the next step meanwhile. The model's part of a step and the sampler's are programs of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.generation.sampling_params import MAX_LOGIT_BIAS
from ttpu_core.spec import axes
from ttpu_jax.model.causal_model import DecoderModel
from ttpu_jax.model.decoder import Caches
from ttpu_jax.model.paged import PagedLayout
from ttpu_jax.ops.sampling import LogitRules, Sampled, TokenCounts
from ttpu_jax.runner.batch import IN_FLIGHT, BatchLayout, put_whole
from ttpu_jax.runner.buckets import Buckets, StepShape
from ttpu_jax.runner.compilation import OnProgress, Program, ProgramPool
from ttpu_jax.runner.sampler import (
    FIELDS,
    NEUTRAL,
    Level,
    SamplerState,
    begin_slot,
    column,
    empty_rules,
    level_of,
    prompt_logprobs,
    sample_rows,
)
from ttpu_serve.api.engine_config import SAMPLING_LEVELS, EngineConfig

if TYPE_CHECKING:
    from ttpu_serve.scheduling.request import Request
    from ttpu_serve.scheduling.scheduler import ScheduledStep


@dataclass(frozen=True)
class RowRules:
    """What the request of one row says of single tokens: tokens and their biases, and a bit per allowed token."""

    bias: tuple[np.ndarray, np.ndarray] | None = None
    allowed: np.ndarray | None = None


@dataclass
class InFlight:
    """A dispatched step. `owners` [rows] are indices into the step's requests."""

    step: ScheduledStep
    sampled: Sampled
    owners: np.ndarray
    hidden: jax.Array | None

    def read(self) -> dict[str, np.ndarray]:
        """Wait for the tokens [rows], and for log-probabilities where they were asked for; names are `Sampled`'s."""
        names = ("token", "logprob", "top_tokens", "top_logprobs")
        present = {name: getattr(self.sampled, name) for name in names if getattr(self.sampled, name) is not None}
        return {name: np.asarray(value)[: len(self.owners)] for name, value in present.items()}


class Runner:
    """The device's side of an engine: weights, caches, programs."""

    def __init__(
        self,
        model: DecoderModel,
        params: Mapping[str, Any],
        config: EngineConfig,
        layout: PagedLayout,
        buckets: Buckets,
        cache_dtype: np.dtype[Any],
        state_dtype: np.dtype[Any],
        *,
        adapters: bool = False,
    ) -> None:
        self.model, self.spec, self.runtime, self.params = model, model.spec, model.runtime, dict(params)
        self.config, self.layout, self.buckets = config, layout, buckets
        self.cache_dtype, self.state_dtype, self.adapters = cache_dtype, state_dtype, adapters
        assert config.max_num_seqs and config.max_model_len and config.page_size
        self.max_num_seqs, self.nobody = config.max_num_seqs, config.max_num_seqs
        self.pages_per_sequence = -(-config.max_model_len // config.page_size)
        self.vocab = model.spec.embedding.rows
        self.max_logprobs = min(config.max_logprobs, model.spec.vocab_size)
        self.highest_level = Level(SAMPLING_LEVELS.index(config.sampling_level))
        self.pool = ProgramPool(strict=config.strict_compile, platform=model.runtime.placement.platform)
        self.num_pages: tuple[int, ...] = ()
        self.caches: Caches = ()
        self._whole = model.runtime.placement.whole()
        self._owners: list[Request | None] = [None] * self.max_num_seqs
        self._sampled = np.zeros(self.max_num_seqs + 1, np.bool_)
        self._columns = np.repeat(NEUTRAL[:, None], self.max_num_seqs + 1, axis=1)
        self._levels = np.zeros(self.max_num_seqs + 1, np.int8)
        self._prompts = np.zeros(self.max_num_seqs + 1, np.int32)
        self._adapters = np.zeros(self.max_num_seqs + 1, np.int32)
        self._asleep: dict[str, tuple[np.ndarray, Any]] = {}
        self._layouts: dict[StepShape, BatchLayout] = {}
        self._no_rules: dict[int, LogitRules] = {}

    # -- setting up --

    def allocate(self, num_pages: Sequence[int]) -> None:
        """Make the caches; `num_pages` per group, with the page that is nobody's."""
        self.num_pages = tuple(num_pages)
        self.caches = self._empty_caches(abstract=False)
        self.state = self._empty_state(abstract=False)

    def release(self) -> None:
        """Give the caches' memory back; what they held is lost."""
        for leaf in jax.tree.leaves((self.caches, self.state)):
            leaf.delete()
        self.caches = ()
        self._owners = [None] * self.max_num_seqs

    def compile(self, progress: OnProgress | None = None) -> None:
        """Compile every program that serving needs."""
        self.pool.compile(self.programs(), progress)

    def programs(self) -> Iterable[Program]:
        """Every program, those that need the most memory first."""
        shapes = self.buckets.all()
        yield from (self._step_program(shape) for shape in shapes)
        for rows in sorted({shape.rows for shape in shapes}, reverse=True):
            yield from (self._sampler_program(rows, level) for level in Level if level <= self.highest_level)
        if self.config.penalties:
            yield self._begin_program()
        if self.config.prompt_logprobs:
            # Those that decode, too: a part of a prompt may have a single token.
            for tokens in sorted({shape.tokens for shape in shapes}):
                yield self._logprobs_program(tokens)

    def length_salt(self, prompt: int) -> bytes:
        """What sets a prompt of so many tokens apart from others that begin alike: with ropes that stretch (dynamic,
        longrope), keys depend on the prompt's length once it is beyond the original context."""
        ropes = (rope for rope in self.runtime.ropes if rope.depends_on_length)
        limits = [rope.original_max_position_embeddings or rope.max_position_embeddings for rope in ropes]
        return prompt.to_bytes(8, "little") if limits and prompt > min(limits) else b""

    def sleep(self) -> None:
        """Move the weights to the host and drop the caches."""
        self._asleep = {path: (np.asarray(value), value.sharding) for path, value in self.params.items()}
        for value in self.params.values():
            value.delete()
        self.release()

    def wake_up(self) -> None:
        """Undo `sleep`, with empty caches."""
        self.params.update({path: jax.device_put(value, sharding) for path, (value, sharding) in self._asleep.items()})
        self._asleep = {}
        self.allocate(self.num_pages)

    def weight(self, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of a parameter, awake or asleep."""
        value = self._asleep[path][0] if self._asleep else self.params[path]
        return tuple(value.shape), np.dtype(value.dtype)

    def replace_weight(self, path: str, value: np.ndarray) -> None:
        """Put a host array of the same shape and dtype in a parameter's place: on its devices, or where it sleeps."""
        if self._asleep:
            self._asleep[path] = value, self._asleep[path][1]
            return
        old = self.params[path]
        self.params[path] = jax.device_put(value, old.sharding).block_until_ready()
        old.delete()

    # -- steps --

    def dispatch(
        self,
        step: ScheduledStep,
        tables: Sequence[np.ndarray],
        rules: Mapping[tuple[int, int], RowRules] | None = None,
        *,
        hidden: bool = False,
    ) -> InFlight:
        """Send a step to the device; returns at once.

        Args:
            tables: per page group int32 [max_num_seqs, pages], by slot.
            rules: (index of the request in the step, draft position) → what its row's tokens must obey.
            hidden: keep the residual stream of the step's tokens, for embeddings and prompt log-probabilities.
        """
        count, slots = len(step.requests), step.slots
        for request, slot in zip(step.requests, slots.tolist(), strict=True):
            if self._owners[slot] is not request:
                self._give_slot(request, slot)
        shape = self.buckets.step(step.num_tokens, count, int(step.counts.max()))
        tokens, owners, rows = self._tokens_and_rows(step)
        layout = self._batch_layout(shape)
        vector = layout.pack(
            tokens, step.counts, step.starts, self._prompts[slots], slots, rows, tables, self._adapters[slots]
        )
        program = self.pool.get(("step", shape), partial(self._step_program, shape))
        last = self.state.last_tokens
        self.caches, logits, stream = program(self.params, self.caches, last, put_whole(vector, self._whole))
        sampled = self._sample(step, shape, logits, tokens, owners, rows, rules or {})
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        return InFlight(step, sampled, owners, stream if hidden else None)

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Log-probabilities of `targets` [tokens], each given the stream `hidden` [bucket, hidden] of the token before;
        with the likeliest `max_logprobs` of each."""
        size = hidden.shape[0]
        padded = np.zeros(size, np.int32)
        padded[: len(targets)] = targets
        program = self.pool.get(("prompt_logprobs", size), partial(self._logprobs_program, size))
        result = program(self.params, hidden, put_whole(padded, self._whole))
        names = ("logprob", "top_tokens", "top_logprobs")
        return {name: np.asarray(getattr(result, name))[: len(targets)] for name in names}

    def forget_sampled(self, slots: np.ndarray) -> None:
        """The newest tokens of these slots are the requests' own again, not what was sampled there last: for drafts,
        whose tokens may not have come true."""
        self._sampled[slots] = False

    # -- inside a step --

    def _give_slot(self, request: Request, slot: int) -> None:
        """Note what the request asks for where its slot's rows are made from."""
        self._owners[slot] = request
        self._sampled[slot] = False
        self._columns[:, slot] = column(request.params, slot)
        self._levels[slot] = level_of(request.params)
        self._prompts[slot] = len(request.prompt)
        self._adapters[slot] = request.adapter
        if request.params.has_penalties and self.config.penalties:
            length = self.config.max_model_len or 0
            prompt, output = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
            prompt[: len(request.prompt)] = request.prompt
            output[: len(request.output)] = request.output
            program = self.pool.get("begin_slot", self._begin_program)
            put = partial(put_whole, sharding=self._whole)
            self.state = program(self.state, put(np.asarray(slot, np.int32)), put(prompt), put(output))

    def _tokens_and_rows(self, step: ScheduledStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of the step, and for each row whose logits are wanted its request and its token."""
        ends = np.cumsum(step.counts)
        tokens = np.full(int(ends[-1]), IN_FLIGHT, np.int32)
        drafts = step.drafts
        on_device = (step.counts == 1) & step.samples & self._sampled[step.slots]
        for index in np.flatnonzero(~on_device).tolist():
            request, start = step.requests[index], int(step.starts[index])
            count, end = int(step.counts[index]), int(ends[index])
            draft = drafts[index] if drafts else []
            known = request.tokens(start, start + count - len(draft))
            tokens[end - count : end] = known + draft if draft else known
        if not drafts or not any(drafts):
            return tokens, np.arange(len(step.requests)), (ends - 1).astype(np.int32)
        owners = np.repeat(np.arange(len(step.requests)), [1 + len(draft) for draft in drafts])
        rows = [np.arange(end - 1 - len(draft), end) for end, draft in zip(ends.tolist(), drafts, strict=True)]
        return tokens, owners, np.concatenate(rows).astype(np.int32)

    def _sample(
        self,
        step: ScheduledStep,
        shape: StepShape,
        logits: jax.Array,
        tokens: np.ndarray,
        owners: np.ndarray,
        rows: np.ndarray,
        rules: Mapping[tuple[int, int], RowRules],
    ) -> Sampled:
        slots = step.slots[owners]
        requests = np.repeat(NEUTRAL[:, None], shape.rows, axis=1)
        requests[FIELDS["slot"]] = self.nobody
        count = len(owners)
        requests[:, :count] = self._columns[:, slots]
        begins = np.cumsum(step.counts) - step.counts
        positions = step.starts[owners] + rows - begins[owners]
        requests[FIELDS["step"], :count] = positions + 1 - self._prompts[slots]
        samples = step.samples[owners]
        lone = samples if count == len(step.requests) else samples & (np.bincount(owners)[owners] == 1)
        # Of several rows of one request the host says which count, so none is left for the next step to find.
        requests[FIELDS["slot"], :count] = np.where(lone, slots, self.nobody)
        self._sampled[slots] = lone
        levels = self._levels[slots][samples]
        level = Level(int(levels.max())) if len(levels) else Level.GREEDY
        program = self.pool.get(("sample", shape.rows, level), partial(self._sampler_program, shape.rows, level))
        given = self._rules(shape.rows, owners, rules) if level is Level.ALL else None
        put = put_whole(requests, self._whole)
        self.state, sampled = program(logits, self.state, put, given)
        result: Sampled = sampled
        return result

    def _rules(
        self, rows: int, owners: np.ndarray, rules: Mapping[tuple[int, int], RowRules]
    ) -> LogitRules:
        if rows not in self._no_rules:
            self._no_rules[rows] = LogitRules(
                *(put_whole(each, self._whole) for each in empty_rules(rows, self.vocab, MAX_LOGIT_BIAS))
            )
        nothing = self._no_rules[rows]
        if not rules:
            return nothing
        tokens, biases, allowed = empty_rules(rows, self.vocab, MAX_LOGIT_BIAS)
        first = {int(owner): row for row, owner in reversed(list(enumerate(owners)))}
        biased = masked = False
        for (index, position), rule in rules.items():
            row = first[index] + position
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

    # -- programs --

    def _step_program(self, shape: StepShape) -> Program:
        caches, state = self._empty_caches(abstract=True), self._empty_state(abstract=True)
        logits = self._logits(shape.rows)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, caches), logits.sharding, self._whole
        vector = self._abstract((self._batch_layout(shape).size,), jnp.int32)
        function = _named(partial(self._step, layout=self._batch_layout(shape)), "engine_step")
        arguments = (self._abstract_params(), caches, state.last_tokens, vector)
        return Program(("step", shape), function, arguments, (1,), shardings)

    def _step(
        self, params: dict[str, jax.Array], caches: Caches, last: jax.Array, vector: jax.Array, *, layout: BatchLayout
    ) -> tuple[Caches, jax.Array, jax.Array]:
        inputs = layout.unpack(vector, last)
        hidden, caches = self.model.ragged_forward(params, inputs.tokens, inputs.batch, caches)
        return caches, self.model.logits(params, hidden[inputs.rows][None])[0], hidden

    def _sampler_program(self, rows: int, level: Level) -> Program:
        state = self._empty_state(abstract=True)
        rules = None
        if level is Level.ALL:
            nothing = empty_rules(1, self.vocab, MAX_LOGIT_BIAS)
            rules = LogitRules(*(self._abstract((rows, *each.shape[1:]), each.dtype) for each in nothing))
        function = partial(sample_rows, level=level, max_logprobs=self.max_logprobs)
        arguments = (self._logits(rows), state, self._abstract((len(NEUTRAL), rows), jnp.int32), rules)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state), self._whole
        return Program(("sample", rows, level), _named(function, "sample_rows"), arguments, (1,), shardings)

    def _begin_program(self) -> Program:
        state = self._empty_state(abstract=True)
        tokens = self._abstract((self.config.max_model_len or 0,), jnp.int32)
        arguments = (state, self._abstract((), jnp.int32), tokens, tokens)
        return Program("begin_slot", begin_slot, arguments, (0,), jax.tree.map(lambda leaf: leaf.sharding, state))

    def _logprobs_program(self, tokens: int) -> Program:
        def run(params: dict[str, jax.Array], hidden: jax.Array, targets: jax.Array) -> Sampled:
            logits = partial(self.model.logits, params)
            return prompt_logprobs(lambda rows: logits(rows[None])[0], hidden, targets, self.max_logprobs)

        hidden = self._abstract((tokens, self.spec.hidden_size), self.state_dtype)
        arguments = (self._abstract_params(), hidden, self._abstract((tokens,), jnp.int32))
        return Program(("prompt_logprobs", tokens), _named(run, "prompt_logprobs"), arguments, (), self._whole)

    # -- shapes --

    def _batch_layout(self, shape: StepShape) -> BatchLayout:
        if shape not in self._layouts:
            self._layouts[shape] = BatchLayout(
                shape,
                len(self.layout.groups),
                self.pages_per_sequence,
                self.config.page_size or 1,
                self.max_num_seqs,
                self.adapters,
            )
        return self._layouts[shape]

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            for path, value in self.params.items()
        }

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        shape, placement = (rows, self.vocab), self.runtime.placement
        sharding = placement.sharding(placement.divisible((None, axes.VOCAB), shape), shape, "logits")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def _empty_caches(self, *, abstract: bool) -> Caches:
        return self.model.empty_paged_cache(
            self.layout,
            self.num_pages,
            self.max_num_seqs,
            self.config.page_size or 1,
            self.cache_dtype,
            self.state_dtype,
            abstract=abstract,
        )

    def _empty_state(self, *, abstract: bool) -> SamplerState:
        slots, placement = self.max_num_seqs + 1, self.runtime.placement

        def make(shape: tuple[int, ...], dtype: Any, logical: tuple[str | None, ...]) -> Any:
            sharding = placement.sharding(placement.divisible(logical, shape), shape, "sampling state")
            if abstract:
                return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            return jnp.zeros(shape, dtype, device=sharding)

        counts = None
        if self.config.penalties:
            shape, logical = (slots, self.vocab), (None, axes.VOCAB)
            counts = TokenCounts(make(shape, jnp.bool_, logical), make(shape, jnp.int32, logical))
        return SamplerState(make((slots,), jnp.int32, (None,)), counts)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under a name that profiles and compiler messages show."""

    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = name
    return run
