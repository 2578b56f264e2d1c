"""All programs of an engine: steps, samplers, and log-probabilities of prompts. They are made from abstract shapes, so
that neither weights nor devices need to be there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_jax.model.causal_model import DecoderModel
from ttpu_jax.model.decoder import Caches
from ttpu_jax.model.modules import ring_of
from ttpu_jax.model.paged import PagedLayout
from ttpu_jax.ops.kernels import LowRankKernel
from ttpu_jax.ops.sampling import Sampled
from ttpu_jax.runner.batch import BatchLayout
from ttpu_jax.runner.buckets import Buckets, StepShape
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.sampler import prompt_logprobs
from ttpu_jax.runner.slot_sampler import SlotSampler, named

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
        self.sampler = SlotSampler(model.runtime.placement, config, self.vocab, model.spec.vocab_size)
        self.num_pages: tuple[int, ...] = ()
        self._whole = model.runtime.placement.whole()
        self._layouts: dict[StepShape, BatchLayout] = {}

    def programs(self) -> Iterable[Program]:
        """Every program, those that need the most memory first."""
        shapes = self.buckets.all()
        yield from (self._step_program(shape) for shape in shapes)
        yield from self._sampler_programs(shapes)
        yield from self._logprobs_programs(shapes)

    def programs_by_need(self) -> Iterable[Program]:
        """Every program, those first that make the most steps faster: a step needs its sampler, and small steps are the
        most."""
        shapes = self.buckets.all()
        yield from self._sampler_programs(shapes)
        yield from (self._step_program(shape) for shape in reversed(shapes))
        yield from self._logprobs_programs(shapes)

    def _sampler_programs(self, shapes: Sequence[StepShape]) -> Iterable[Program]:
        return self.sampler.programs(sorted({shape.rows for shape in shapes}, reverse=True))

    def _logprobs_programs(self, shapes: Sequence[StepShape]) -> Iterable[Program]:
        if self.config.prompt_logprobs:
            # Those that decode, too: a part of a prompt may have a single token.
            for tokens in sorted({shape.tokens for shape in shapes}):
                yield self._logprobs_program(tokens)

    def _step_program(self, shape: StepShape) -> Program:
        caches, state = self._empty_caches(abstract=True), self.sampler.empty_state(abstract=True)
        logits = self.sampler.logits(shape.rows)
        hidden = self._hidden(shape.tokens)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, caches), logits.sharding, hidden.sharding
        vector = self._abstract((self._batch_layout(shape).size,), jnp.int32)
        function = named(partial(self._step, layout=self._batch_layout(shape)), "engine_step")
        arguments = (self._abstract_params(), caches, state.last_tokens, vector)
        return Program(("step", shape), function, arguments, (1,), shardings)

    def _step(
        self, params: dict[str, jax.Array], caches: Caches, last: jax.Array, vector: jax.Array, *, layout: BatchLayout
    ) -> tuple[Caches, jax.Array, jax.Array]:
        inputs = layout.unpack(vector, last)
        hidden, caches = self.model.ragged_forward(params, inputs.tokens, inputs.batch, caches)
        return caches, self.model.logits(params, hidden[inputs.rows][None])[0], hidden

    def _logprobs_program(self, tokens: int) -> Program:
        def run(params: dict[str, jax.Array], hidden: jax.Array, targets: jax.Array) -> Sampled:
            logits = partial(self.model.logits, params)
            return prompt_logprobs(lambda rows: logits(rows[None])[0], hidden, targets, self.sampler.max_logprobs)

        arguments = (self._abstract_params(), self._hidden(tokens), self._abstract((tokens,), jnp.int32))
        return Program(("prompt_logprobs", tokens), named(run, "prompt_logprobs"), arguments, (), self._whole)

    # -- shapes --

    def _hidden(self, tokens: int) -> Any:
        """The residual stream of a step, [tokens, features], whose rows the devices of a ring keep cut."""
        hidden = self._abstract((tokens, self.spec.embedding.features), self.state_dtype)
        ring = ring_of(jax.ShapeDtypeStruct((1, *hidden.shape), hidden.dtype), self.runtime)
        if ring is None:
            return hidden
        cut = NamedSharding(ring.mesh, PartitionSpec(ring.axis, None))
        return jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=cut)

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
