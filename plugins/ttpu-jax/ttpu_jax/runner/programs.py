"""All programs of an engine: steps, samplers, and log-probabilities of prompts. They are made from abstract shapes, so
that neither weights nor devices need to be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from ttpu_jax.ops.kernels import LowRankKernel
from ttpu_jax.ops.sampling import LogitRules, Sampled, TokenCounts
from ttpu_jax.runner.batch import BatchLayout
from ttpu_jax.runner.buckets import Buckets, StepShape
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.sampler import (
    NEUTRAL,
    Level,
    SamplerState,
    begin_slot,
    empty_rules,
    prompt_logprobs,
    sample_rows,
)

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig


class EnginePrograms:
    """An engine's programs, and the shapes that they are made from.

    num_pages: pages of each group, on which the steps depend; set before `programs` is asked.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: Mapping[str, Any],
        config: EngineConfig,
        layout: PagedLayout,
        buckets: Buckets,
        cache_dtype: np.dtype[Any],
        state_dtype: np.dtype[Any],
    ) -> None:
        """
        Args:
            model: what a step runs.
            params: Flax path → kernel or other array, on devices or only shapes.
            config: as `EngineConfig.filled` gives it.
            cache_dtype: of cached keys and values. state_dtype: of recurrent states and the residual stream.
        """
        self.model, self.spec, self.runtime, self.params = model, model.spec, model.runtime, dict(params)
        self.config, self.layout, self.buckets = config, layout, buckets
        self.cache_dtype, self.state_dtype = cache_dtype, state_dtype
        self.has_adapters = any(isinstance(value, LowRankKernel) for value in self.params.values())
        assert config.max_num_seqs and config.max_model_len and config.page_size
        self.max_num_seqs = config.max_num_seqs
        self.pages_per_sequence = -(-config.max_model_len // config.page_size)
        self.vocab = model.spec.embedding.rows
        self.max_logprobs = min(config.max_logprobs, model.spec.vocab_size)
        self.highest_level = Level[config.sampling_level.upper()]
        self.num_pages: tuple[int, ...] = ()
        self._whole = model.runtime.placement.whole()
        self._layouts: dict[StepShape, BatchLayout] = {}

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
                self.has_adapters,
            )
        return self._layouts[shape]

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _abstract_params(self) -> dict[str, Any]:
        abstract: dict[str, Any] = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), self.params
        )
        return abstract

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
