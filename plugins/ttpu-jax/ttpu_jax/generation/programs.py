"""The two compiled programs of generation: the prefill of a padded bucket, and one decode step. Each is compiled once
per shape and set of sampling features, never per value; its cache is donated and updated in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import axes
from ttpu_core.spec.arithmetic import REWOUND
from ttpu_jax.compiler_flags import program_options
from ttpu_jax.compiling import compiled_with, lower
from ttpu_jax.model.cache import KVCache
from ttpu_jax.model.causal_model import DecoderModel
from ttpu_jax.ops.sampling import (
    Sampled,
    SamplingFeatures,
    SamplingInputs,
    TokenCounts,
    sample,
    update,
)

PREFILL_CHUNK = 1024  # tokens per prefill call; longer prompts take several, which bounds the score matrix
SMALLEST_BUCKET = 16
SMALLEST_CACHE = 128

Compiled = Callable[..., Any]
OnCompile = Callable[[str, float], None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state that one step passes to the next, all on the device.

    Attributes:
        cache: keys and values of all earlier tokens.
        token: int32 [batch], the last token of each row.
        step: int32 [batch], the number of generated tokens.
        counts: token counts where penalties need them, else None.
    """

    cache: KVCache
    token: jax.Array
    step: jax.Array
    counts: TokenCounts | None


def prompt_bucket(length: int) -> int:
    """Padded prompt length: a power of two up to a chunk, then whole chunks."""
    if length > PREFILL_CHUNK:
        return -(-length // PREFILL_CHUNK) * PREFILL_CHUNK
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def cache_bucket(slots: int, platform: str = "tpu") -> int:
    """Cache length: a multiple of 128, as kernels for TPUs need it, of few, so that few lengths are ever compiled: 512,
    768, 1024, 1536, ... A CPU, which reads empty slots too, also has those between: 640, 896, 1280, ..."""
    step = max(SMALLEST_CACHE, (1 << (slots - 1).bit_length()) // (8 if platform == "cpu" else 4))
    return -(-slots // step) * step


class Programs:
    """Compiles and keeps the programs of one model.

    `compiles` counts compilations; `on_compile(name, seconds)` is called before each (seconds 0) and after.
    """

    def __init__(
        self,
        model: DecoderModel,
        params: dict[str, Any],
        cache_dtype: np.dtype[Any],
        *,
        on_compile: OnCompile | None = None,
    ) -> None:
        self.model, self.spec, self.runtime, self.cache_dtype = model, model.spec, model.runtime, cache_dtype
        self.on_compile = on_compile
        self.compiles = 0
        self._of_thread = threading.local()
        self._params = params
        self._programs: dict[tuple[Any, ...], Compiled] = {}

    def forget(self) -> None:
        """Drop what was compiled: parameters get other structures, as kernels get adapters."""
        self._programs.clear()

    @property
    def compile_seconds(self) -> float:
        """How long this thread has compiled: programs of another thread's call are none of its own."""
        return float(getattr(self._of_thread, "compile_seconds", 0.0))

    @property
    def _keeps_bfloat16(self) -> bool:
        return self.cache_dtype == np.dtype(jnp.bfloat16)

    @property
    def repeats_rows(self) -> bool:
        """Whether `repeated` gives several rows to one prompt; otherwise the prompt is read for each of them."""
        return True

    @property
    def prefill_chunk(self) -> int | None:
        """The most tokens of a prompt that `prefill` is given at once; None for all of them."""
        return PREFILL_CHUNK

    def prompt_width(self, longest: int) -> int:
        """The length that prompts are padded to; `longest` is that of the longest one."""
        return prompt_bucket(longest)

    def start(
        self,
        starts: np.ndarray,
        prompt_end: int,
        slots: int,
        seen: np.ndarray | None = None,
        *,
        rewound: int = REWOUND,
    ) -> DecodeState:
        """Make the state for a new batch, with an empty cache.

        Args:
            starts: int [batch], the first slot of each prompt; prompts are left-padded.
            prompt_end: the slot after the prompts.
            slots: slots of each row.
            seen: bool [batch, rows of the token table], the tokens of each prompt, where penalties count them.
            rewound: the most tokens that `rewound` takes back at once.
        """
        batch = len(starts)
        cache = self.model.empty_cache(batch, slots, self.cache_dtype, rewound=rewound)
        put = partial(jax.device_put, device=cache.start.sharding)
        end = jax.device_put(np.int32(prompt_end), cache.prompt_end.sharding)
        cache = replace(cache, start=put(starts.astype(np.int32)), prompt_end=end)
        zeros = np.zeros(batch, np.int32)
        counts = None if seen is None else TokenCounts(put(seen), put(np.zeros(seen.shape, np.int32)))
        return DecodeState(cache, put(zeros), put(zeros), counts)

    def prefill(
        self, state: DecodeState, tokens: np.ndarray, inputs: SamplingInputs, features: SamplingFeatures, *, fresh: bool
    ) -> tuple[DecodeState, Sampled]:
        """Run tokens through the model and sample the next one. `state` is consumed.

        Args:
            state: the state before these tokens.
            tokens: int32 [batch, chunk].
            inputs: the sampling parameters of each row.
            features: the sampling features that any row uses.
            fresh: the cache is empty, so that attention need not read it.
        """
        key = ("prefill", *tokens.shape, *state.cache.size, fresh, features)
        program = self._get(key, partial(self._prefill, fresh=fresh, features=features), state, tokens, inputs)
        return program(self._params, state, tokens, inputs)

    def decode(
        self, state: DecodeState, inputs: SamplingInputs, features: SamplingFeatures
    ) -> tuple[DecodeState, Sampled]:
        """Generate one token for every row. `state` is consumed."""
        key = ("decode", state.token.shape[0], *state.cache.size, features)
        step = partial(self._decode, features=features)
        program = self._get(key, step, state, inputs, writes_bfloat16=self._keeps_bfloat16)
        return program(self._params, state, inputs)

    def prefill_logits(self, state: DecodeState, tokens: np.ndarray, *, fresh: bool) -> tuple[DecodeState, jax.Array]:
        """Run tokens through the model, and choose none. `state` is consumed.

        Args:
            state: the state before these tokens.
            tokens: int32 [batch, chunk].
            fresh: the cache is empty, so that attention need not read it.

        Returns:
            The state, and the logits of the last token, float32 [batch, vocab], whole on every device.
        """
        key = ("prefill logits", *tokens.shape, *state.cache.size, fresh)
        program = self._get(key, partial(self._logits_of, fresh=fresh), state, tokens)
        return program(self._params, state, tokens)

    def decode_logits(
        self, state: DecodeState, tokens: jax.Array, rows: jax.Array | None = None
    ) -> tuple[DecodeState, jax.Array]:
        """Run one token of every row through the model, and choose none. `state` is consumed.

        Args:
            state: the state before these tokens.
            tokens: int32 [batch].
            rows: int32 [batch], the earlier row that each row continues; None where each continues itself.

        Returns:
            The state, and the logits, float32 [batch, vocab], whole on every device.
        """
        key = ("decode logits", *tokens.shape, *state.cache.size, rows is not None)
        program = self._get(key, self._next_logits, state, tokens, rows, writes_bfloat16=self._keeps_bfloat16)
        return program(self._params, state, tokens, rows)

    def block_logits(self, state: DecodeState, tokens: np.ndarray) -> tuple[DecodeState, jax.Array]:
        """Run several tokens of every row through the model. `state` is consumed.

        Args:
            state: the state before these tokens.
            tokens: int32 [batch, number].

        Returns:
            The state, and the logits after each token, float32 [batch, number, vocab], whole on every device.
        """
        key = ("block logits", *tokens.shape, *state.cache.size)
        program = self._get(key, self._block_logits, state, tokens, writes_bfloat16=self._keeps_bfloat16)
        return program(self._params, state, tokens)

    @property
    def keeps_tokens(self) -> str | None:
        """Why tokens cannot be taken back by `rewound`; None where they can."""
        if any(rope.depends_on_length for rope in self.runtime.ropes):
            return "the rope of this model depends on the length of the text, which guesses change"
        states = [state for layer in self.spec.layers for mixer in layer.mixers for state in mixer.state]
        if all(axes.SEQUENCE in state.axes for state in states):
            return None
        return f"{self.spec.model_type} keeps recurrent states, from which no token can be taken back"

    def rewound(self, state: DecodeState, length: int) -> DecodeState:
        """Take back all tokens at slots from `length` on, no more than `start` was told."""
        end = jax.device_put(np.int32(length), state.cache.length.sharding)
        return replace(state, cache=replace(state.cache, length=end))

    def repeated(self, state: DecodeState, times: int) -> DecodeState:
        """Return a state with each row `times` times in succession. `state` stays as it is."""
        batch = state.token.shape[0] * times
        slots, rewound = state.cache.size
        empty = self.model.empty_cache(batch, slots, self.cache_dtype, rewound=rewound, abstract=True)
        shardings = jax.tree.map(lambda array: array.sharding, empty)
        rows = np.repeat(np.arange(batch // times, dtype=np.int32), times)
        key = ("repeat rows", batch, times, slots, rewound)
        program = self._get(key, lambda params, *given: self._rows_of(*given), state.cache, rows, out=shardings)
        cache = program(self._params, state.cache, rows)
        token, step = (jax.device_put(np.zeros(batch, np.int32), cache.start.sharding) for _ in range(2))
        return DecodeState(cache, token, step, None)

    def compiled(self, name: str, function: Callable[..., Any], key: tuple[Any, ...], *arguments: Any) -> Any:
        """Call a function of arrays that are whole on every device, as are its results, compiled once per key and
        shapes.

        Args:
            name: of the program, for `on_compile`.
            function: takes `arguments`.
            key: what else decides on the program.
            arguments: trees of arrays.
        """
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        placement = self.runtime.placement.whole()
        whole = jax.device_put(arguments, placement)
        program = self._get(
            (name, key, tree, shapes), lambda params, *given: function(*given), *whole, out=placement
        )
        return program(self._params, *whole)

    def logits(self, tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        """Compute the logits [batch, seq, vocab] of whole sequences without a cache.

        Args:
            tokens: int32 [batch, seq].
            positions: int32 [batch, seq], negative for padding.
        """
        key = ("logits", *tokens.shape)
        program = self._get(key, self._logits, tokens, positions)
        return program(self._params, tokens, positions)

    def hidden_states(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[jax.Array, ...]:
        """Compute what goes into each layer, and the stream after the final norm, float32 [batch, seq, hidden] each, of
        whole sequences without a cache.

        Args:
            tokens: int32 [batch, seq].
            positions: int32 [batch, seq], negative for padding.

        Raises:
            UnsupportedError: a model whose layers pass several streams on.
        """
        key = ("hidden states", *tokens.shape)
        program = self._get(key, self._hidden_states, tokens, positions, out=self.runtime.placement.whole())
        found: tuple[jax.Array, ...] = program(self._params, tokens, positions)
        return found

    def _get(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        *arguments: Any,
        out: Any = None,
        writes_bfloat16: bool = False,
    ) -> Compiled:
        program = self._programs.get(key)
        if program is None:
            if self.on_compile is not None:
                self.on_compile(str(key[0]), 0.0)
            began = time.perf_counter()
            traced = lower(self._jit(function, arguments[0], out), self._params, *arguments)
            placement = self.runtime.placement
            options = program_options(placement.platform, placement.chip, writes_bfloat16=writes_bfloat16)
            program = compiled_with(traced, options)
            seconds = time.perf_counter() - began
            self._programs[key] = program
            self.compiles += 1
            self._of_thread.compile_seconds = self.compile_seconds + seconds
            if self.on_compile is not None:
                self.on_compile(str(key[0]), seconds)
        return program

    def _jit(self, function: Callable[..., Any], first: Any, out: Any = None) -> Any:
        """Jit, with the state donated and handed back in the shardings in which it came, and what was sampled whole on
        every device, so that every process can read it. `out`: the shardings of what a function without state returns;
        None leaves them to the compiler."""
        placement = self.runtime.placement
        if not isinstance(first, DecodeState):
            return jax.jit(function, out_shardings=placement.read_by_host() if out is None else out)
        shardings = jax.tree.map(lambda array: array.sharding, first)
        return jax.jit(function, donate_argnums=1, out_shardings=(shardings, placement.whole()))

    def _prefill(
        self,
        params: dict[str, jax.Array],
        state: DecodeState,
        tokens: jax.Array,
        inputs: SamplingInputs,
        *,
        fresh: bool,
        features: SamplingFeatures,
    ) -> tuple[DecodeState, Sampled]:
        logits, cache = self.model.forward(params, tokens, cache=state.cache, last_only=True, fresh=fresh)
        assert cache is not None
        return self._sample(logits, replace(state, cache=cache), inputs, features)

    def _decode(
        self,
        params: dict[str, jax.Array],
        state: DecodeState,
        inputs: SamplingInputs,
        *,
        features: SamplingFeatures,
    ) -> tuple[DecodeState, Sampled]:
        counts = None if state.counts is None else update(state.counts, state.token)
        state = replace(state, counts=counts, step=state.step + 1)
        logits, cache = self.model.forward(params, state.token[:, None], cache=state.cache, last_only=True)
        assert cache is not None
        return self._sample(logits, replace(state, cache=cache), inputs, features)

    def _logits_of(
        self, params: dict[str, jax.Array], state: DecodeState, tokens: jax.Array, *, fresh: bool = False
    ) -> tuple[DecodeState, jax.Array]:
        logits, cache = self.model.forward(params, tokens, cache=state.cache, last_only=True, fresh=fresh)
        assert cache is not None
        return replace(state, cache=cache), logits[:, -1]

    def _block_logits(
        self, params: dict[str, jax.Array], state: DecodeState, tokens: jax.Array
    ) -> tuple[DecodeState, jax.Array]:
        logits, cache = self.model.forward(params, tokens, cache=state.cache)
        assert cache is not None
        return replace(state, cache=cache), logits

    def _next_logits(
        self, params: dict[str, jax.Array], state: DecodeState, tokens: jax.Array, rows: jax.Array | None
    ) -> tuple[DecodeState, jax.Array]:
        if rows is not None:
            state = replace(state, cache=self._rows_of(state.cache, rows))
        return self._logits_of(params, state, tokens[:, None])

    def _rows_of(self, cache: KVCache, rows: jax.Array) -> KVCache:
        """The cache of a new batch whose row i was row `rows`[i]."""
        taken = partial(jnp.take, indices=rows, axis=1 if self.model.stacked else 0)
        return replace(cache, layers=jax.tree.map(taken, cache.layers), start=cache.start[rows])

    def _sample(
        self, logits: jax.Array, state: DecodeState, inputs: SamplingInputs, features: SamplingFeatures
    ) -> tuple[DecodeState, Sampled]:
        sampled = sample(logits[:, -1], inputs, state.counts, state.step, features)
        return replace(state, token=sampled.token), sampled

    def _hidden_states(
        self, params: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, ...]:
        states = self.model.module(params).hidden_states(tokens, positions)
        return tuple(state.astype(jnp.float32) for state in states)

    def _logits(self, params: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array) -> jax.Array:
        logits = self.model.forward(params, tokens, positions)[0]
        if self.spec.embedding.rows == self.spec.vocab_size:
            return logits
        logits = logits[..., : self.spec.vocab_size]
        return self.runtime.placement.constrain(logits, axes.BATCH, axes.SEQUENCE, axes.VOCAB)


def prompts_seen(prompts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """Return bool [batch, rows], true for the rows of the token table that a prompt contains."""
    seen = np.zeros((len(prompts), rows), np.bool_)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    return seen
