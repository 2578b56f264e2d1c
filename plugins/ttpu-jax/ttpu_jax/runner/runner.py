"""The JAX `ModelRunner`: weights, pages and programs on the devices of one process. It runs steps and returns handles
whose tokens are read later, so that the host can schedule the next step meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ttpu_core.errors import UnsupportedError
from ttpu_jax.model.causal_model import DecoderModel
from ttpu_jax.model.decoder import Caches
from ttpu_jax.model.paged import GroupSpec, PagedLayout, group_page_bytes
from ttpu_jax.ops.kernels import QuantizedKernel, base_of, with_base
from ttpu_jax.ops.sampling import Sampled
from ttpu_jax.runner.batch import put_whole
from ttpu_jax.runner.buckets import Buckets, StepShape
from ttpu_jax.runner.compilation import CompileStats, OnProgress, ProgramPool, ProgramStats, program_stats
from ttpu_jax.runner.programs import EnginePrograms
from ttpu_jax.runner.reserve import fitting_pages
from ttpu_jax.runner.slot_sampler import SampledRows, read_rows
from ttpu_jax.runner.stats import Devices, Limits, MemoryStats
from ttpu_jax.runner.weights import ServedWeights, opened_update

if TYPE_CHECKING:
    from ttpu_jax.runner.adapter_slots import LoadedAdapters
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import InFlight as AnyInFlight
    from ttpu_serve.runner import ModelRunner, RunnerStep


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of given tokens: logprob [tokens], top_tokens and top_logprobs [tokens, max_logprobs]."""

    logprob: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class InFlight:
    """A dispatched step of `rows` rows; `hidden` [bucket, hidden] where the step kept its residual stream."""

    sampled: Sampled
    rows: int
    hidden: jax.Array | None

    def read(self) -> SampledRows:
        """Wait for the step, and return what its rows sampled."""
        return read_rows(self.sampled, slice(self.rows))

    def read_hidden(self) -> np.ndarray:
        """Wait for the step, and return its residual stream [tokens, hidden], padding at its end."""
        assert self.hidden is not None
        return np.asarray(self.hidden)


class Runner(EnginePrograms):
    """The device side of an engine: weights, caches, programs. It serves from one process."""

    adapters: LoadedAdapters | None = None
    served: ServedWeights | None = None

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
            model, params, config, layout, buckets, cache_dtype, state_dtype: as for `EnginePrograms`; parameters are
                on devices.
        """
        super().__init__(model, params, config, layout, buckets, cache_dtype, state_dtype)
        assert config.max_model_len and config.max_num_batched_tokens and config.page_size
        self.pool = ProgramPool(strict=config.strict_compile, platform=self.runtime.placement.platform)
        self.caches: Caches = ()
        self.limits = Limits(
            max_model_len=config.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefills=self.buckets.max_prefills,
            draft_tokens=self.buckets.draft,
            page_size=config.page_size,
            recurrent=self.layout.recurrent,
            vocab_size=self.spec.vocab_size,
            logit_columns=self.vocab,
            sampling_level=config.sampling_level,
            penalties=config.penalties,
            prompt_logprobs=config.prompt_logprobs,
            max_logprobs=self.sampler.max_logprobs,
        )
        self._adapters = np.zeros(self.max_num_seqs + 1, np.int32)
        self._asleep: dict[str, Any] = {}
        self._shardings: dict[str, Any] = {}

    # -- what it is --

    @property
    def page_groups(self) -> Sequence[GroupSpec]:
        """The page groups of the model."""
        return self.layout.groups

    @property
    def devices(self) -> Devices:
        """The devices that the model runs on."""
        return Devices.of(self.runtime.placement)

    def memory_stats(self) -> MemoryStats:
        """The bytes of the weights, and of one number of a cached key or value."""
        weight_bytes = sum(array.nbytes for array in jax.tree.leaves(self.params))
        return MemoryStats(weight_bytes, self.cache_dtype.itemsize)

    def compile_stats(self) -> CompileStats:
        """The statistics of all compilations so far."""
        return self.pool.stats()

    def program_stats(self) -> Sequence[ProgramStats]:
        """Every compiled program, those that need the most memory first."""
        return program_stats(self.pool, [program.key for program in self.programs()])

    # -- its life --

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        """Make the caches: pages and recurrent states.

        Args:
            num_pages: per group, with the null page; None takes what the settings say, or fills the free memory.
            draft: a runner of this class, whose pages are counted too.

        Raises:
            RequestError: not even one sequence of `max_model_len` tokens fits.
        """
        if num_pages is None:
            assert draft is None or isinstance(draft, Runner)
            num_pages = fitting_pages(self, self.pool, self.page_bytes(), draft)
        self.num_pages = tuple(num_pages)
        self.caches = self._empty_caches(abstract=False)
        self.sampler.state = self.sampler.empty_state(abstract=False)

    def page_bytes(self) -> tuple[int, ...]:
        """The bytes on one device of one page of each group, summed over its layers."""
        size, placement = self.limits.page_size, self.runtime.placement
        return tuple(group_page_bytes(self.spec, self.layout, size, placement, self.cache_dtype))

    def compile(self, progress: OnProgress | None = None) -> None:
        """Compile every program that serving needs, or in the background all but those with which any request can be
        served. Later compilations count as compiled while serving."""
        first = self.first_programs()
        self.pool.compile((each for each in self.programs() if first is None or each.key in first), progress)
        if first is not None:
            self.pool.compile_meanwhile(self.programs_by_need())
        self.pool.serving = True

    def first_programs(self) -> set[Hashable] | None:
        """Keys of the programs that are compiled before the engine serves; None is all."""
        if not self.config.compile_meanwhile or self.config.strict_compile:
            return None
        shapes = self.buckets.first()
        rows = {shape.rows for shape in shapes}
        return {("step", shape) for shape in shapes} | self.sampler.first_programs(rows)

    def _shape(self, step: RunnerStep) -> StepShape:
        """The smallest shape that holds a step; while it is not compiled, the smallest one that is."""
        most = int(step.counts.max())
        shape = self.buckets.step(step.num_tokens, len(step.slots), most)
        if self.pool.has(("step", shape)) or not self.config.compile_meanwhile:
            return shape
        prefills = int((step.counts > 1).sum())
        needed = StepShape(step.num_tokens, len(step.slots), len(step.rows), most, prefills)
        return next((each for each in self.buckets.holding(needed) if self.pool.has(("step", each))), shape)

    def release(self) -> None:
        """Free the memory of the caches for good, and compile nothing more."""
        self.pool.close()
        self._free_caches()

    def _free_caches(self) -> None:
        for leaf in jax.tree.leaves((self.caches, self.sampler.state)):
            leaf.delete()
        self.caches = ()

    def sleep(self) -> None:
        """Move the weights to the host and drop the caches."""
        self._asleep = jax.tree.map(np.asarray, self.params)
        self._shardings = jax.tree.map(lambda array: array.sharding, self.params)
        for array in jax.tree.leaves(self.params):
            array.delete()
        self._free_caches()

    def wake_up(self) -> None:
        """Undo `sleep`, with empty caches."""
        self.params.update(jax.tree.map(jax.device_put, self._asleep, self._shardings))
        self._asleep = {}
        self.allocate(self.num_pages)
        self._share()

    @contextmanager
    def weight_update(self, weights: str | Path | Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Open and check new weights as a context manager; see `ttpu_jax.runner.weights.opened_update`."""
        assert self.served is not None
        with opened_update(self, self.served.mapping, weights) as replace:

            def replace_and_share() -> None:
                try:
                    replace()
                finally:
                    self._share()

            yield replace_and_share

    def weight(self, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and dtype of a parameter, awake or asleep; for an adapted kernel, those of its base.

        Raises:
            UnsupportedError: a quantized kernel.
        """
        base = base_of((self._asleep or self.params)[path])
        if isinstance(base, QuantizedKernel):
            raise UnsupportedError(
                f"the weight {path!r} was to be updated, but it is quantized, and only dense weights are replaced "
                "while serving: load the new checkpoint instead."
            )
        return tuple(base.shape), np.dtype(base.dtype)

    def replace_weight(self, path: str, value: np.ndarray) -> None:
        """Replace a parameter, on its devices or in host memory while the engine sleeps. value: a host array of the
        same shape and dtype as the parameter."""
        if self._asleep:
            self._asleep[path] = with_base(self._asleep[path], value)
            return
        kernel = self.params[path]
        old = base_of(kernel)
        self.params[path] = with_base(kernel, jax.device_put(value, old.sharding).block_until_ready())
        old.delete()

    def _share(self) -> None:
        """Give the loaded model this runner's arrays: those that it had are gone."""
        if self.served is not None:
            shared = self.served.shared
            shared.update({path: base_of(self.params[path]) for path in shared})

    # -- steps --

    def length_salt(self, prompt_length: int) -> bytes:
        """Return the bytes that distinguish cached prefixes of prompts of this length from others. With ropes that
        stretch (dynamic, longrope), keys depend on the prompt's length beyond the original context."""
        ropes = (rope for rope in self.runtime.ropes if rope.depends_on_length)
        limits = [rope.original_max_position_embeddings or rope.max_position_embeddings for rope in ropes]
        return prompt_length.to_bytes(8, "little") if limits and prompt_length > min(limits) else b""

    def dispatch(self, step: RunnerStep) -> InFlight:
        """Send a step to the device; returns at once."""
        for start in step.begins:
            self.sampler.begin(start, self.pool)
            self._adapters[start.slot] = start.adapter
        slots = step.slots
        shape = self._shape(step)
        vector = self._batch_layout(shape).pack(
            step.tokens, step.counts, step.starts, self.sampler.prompts[slots], slots, step.rows, step.tables,
            self._adapters[slots],
        )  # fmt: skip
        program = self.pool.get(("step", shape), partial(self._step_program, shape))
        last = self.sampler.state.last_tokens
        self.caches, logits, stream = program(self.params, self.caches, last, put_whole(vector, self._whole))
        sampled = self.sampler.sample(step, shape.rows, logits, self.pool)
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        return InFlight(sampled, len(step.owners), stream if step.hidden else None)

    def prompt_logprobs(self, step: AnyInFlight, targets: np.ndarray) -> TokenLogprobs:
        """Log-probabilities of `targets` [tokens], each given the step's token of the same index; with the likeliest
        `max_logprobs` of each."""
        assert isinstance(step, InFlight) and step.hidden is not None
        size = step.hidden.shape[0]
        padded = np.zeros(size, np.int32)
        padded[: len(targets)] = targets
        program = self.pool.get(("prompt_logprobs", size), partial(self._logprobs_program, size))
        result = program(self.params, step.hidden, put_whole(padded, self._whole))
        names = ("logprob", "top_tokens", "top_logprobs")
        return TokenLogprobs(*(np.asarray(getattr(result, name))[: len(targets)] for name in names))
