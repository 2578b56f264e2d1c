"""The compiled programs of a stock model: prefill, one decode step, logits of whole texts. They have the interface of
`ttpu_jax.generation.programs`, so that its loop generates."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_any.sharding import batch_sharding, constrain_cache
from ttpu_any.steps import Manner, Prefill, Steps
from ttpu_any.trace import Traced
from ttpu_core.errors import UnsupportedError
from ttpu_jax.generation.programs import OnCompile, Programs, prompt_bucket
from ttpu_jax.model.modules import Runtime
from ttpu_jax.ops.sampling import Sampled, SamplingFeatures, SamplingInputs, TokenCounts, sample, update
from ttpu_jax.params.placement import Placement

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the token table."""

    rows: int


@dataclass(frozen=True)
class StockSpec:
    """What generation asks of an architecture.

    Attributes:
        model_type: of the config.
        vocab_size: the number of tokens.
        context: the most tokens that a sequence may have.
    """

    model_type: str
    vocab_size: int
    context: int

    @property
    def embedding(self) -> Vocabulary:
        """The token table."""
        return Vocabulary(self.vocab_size)

    @property
    def kernel_formats(self) -> tuple[()]:
        """Formats of quantized weights: there are none."""
        return ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StockState:
    """The state that one step passes to the next.

    Attributes:
        cache: the tensors of the model's cache.
        start: int32 [rows], the first slot of each row that is not padding.
        length: int32 scalar, slots in use.
        token: int32 [rows], the last token of each row.
        step: int32 [rows], the number of generated tokens.
        counts: token counts where penalties need them, else None.
        slots: of the cache, used and free.
    """

    cache: tuple[jax.Array, ...]
    start: jax.Array
    length: jax.Array
    token: jax.Array
    step: jax.Array
    counts: TokenCounts | None
    slots: int = field(metadata={"static": True})


@dataclass(frozen=True)
class Batch:
    """A batch that is to be prefilled: the first slot of each row, the slots of the cache, and the tokens seen."""

    start: np.ndarray
    slots: int
    seen: np.ndarray | None


class StockPrograms(Programs):
    """Traces, compiles and keeps the programs of one stock model.

    Args:
        model: the stock model, with its tensors on the meta device.
        params: name → array.
        spec: of the model.
        placement: of the arrays.
        manner: how the model wants its masks.
        on_compile: see `ttpu_jax.generation.programs.Programs`.
    """

    def __init__(
        self,
        model: Any,
        params: dict[str, jax.Array],
        spec: StockSpec,
        placement: Placement,
        manner: Manner,
        *,
        on_compile: OnCompile | None = None,
    ) -> None:
        self.steps, self.placement = Steps(model, manner), placement
        self.spec = cast(Any, spec)
        self.runtime = Runtime(placement)
        self.on_compile = on_compile
        self.compiles, self._of_thread = 0, threading.local()
        self._params = params
        self._seen = placement.read_by_host()
        self._programs = {}
        self._prefills: dict[tuple[int, int, int], Prefill] = {}
        self._decodes: dict[tuple[int, int], Traced] = {}

    @property
    def manner(self) -> Manner:
        """How the model wants its masks."""
        return self.steps.manner

    @property
    def keeps_tokens(self) -> str:
        """Why tokens cannot be taken back."""
        return "the cache of a model that runs without a plugin gives no token back"

    @property
    def repeats_rows(self) -> bool:
        """A cache serves as many rows as were prefilled."""
        return False

    @property
    def prefill_chunk(self) -> None:
        """A prompt is read at once."""
        return None

    def prompt_width(self, longest: int) -> int:
        """The length that prompts are padded to; `longest` is that of the longest one."""
        return prompt_bucket(longest) if self.manner.pads else longest

    def start(
        self, starts: np.ndarray, prompt_end: int, slots: int, seen: np.ndarray | None = None, *, rewound: int = 0
    ) -> Any:
        """The batch that `prefill` begins with; a stock model makes its own cache.

        Args:
            starts: [batch], the first slot of each row that is not padding.
            prompt_end: not used.
            slots: of the cache.
            seen: [batch, vocab], how often the prompt has each token, or None.
            rewound: not used: no tokens are taken back from such a cache.

        Raises:
            UnsupportedError: prompts of different lengths, for a model that cannot be padded.
        """
        if not self.manner.pads and starts.any():
            raise UnsupportedError(
                f"prompts of different lengths were given, but {type(self.steps.model).__name__} computes something "
                "else for padded prompts: pass prompts of one length, or one after another."
            )
        return Batch(starts.astype(np.int32), slots, seen)

    def prefill(
        self, state: Any, tokens: np.ndarray, inputs: SamplingInputs, features: SamplingFeatures, *, fresh: bool
    ) -> tuple[Any, Sampled]:
        """Run prompts through the model and sample the next token of each.

        Args:
            state: the batch, as `start` returned it.
            tokens: int32 [batch, width].
            inputs: the sampling parameters of each row.
            features: the sampling features that any row uses.
            fresh: always true, because prompts are read at once.
        """
        assert fresh and isinstance(state, Batch)
        rows = len(tokens)
        total = max(rows, self.manner.rows)
        tokens, start = _rows(tokens.astype(np.int32), total), _rows(state.start, total)
        inputs = jax.tree.map(lambda array: jnp.asarray(_rows(np.asarray(array), total)), inputs)
        counts = None
        if state.seen is not None:
            seen = _rows(state.seen, total)
            counts = TokenCounts(jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32))
        traced = self._traced_prefill(total, tokens.shape[1], state.slots)
        key = ("prefill", total, tokens.shape[1], state.slots, features)
        function = partial(self.first_token, traced, slots=state.slots, features=features)
        given = (self._placed(tokens), self._placed(start), inputs, counts)
        program = self._get(key, function, *given, out=(None, self._seen))
        after, sampled = program(self._params, *given)
        return after, _first_rows(sampled, rows)

    def decode(self, state: Any, inputs: SamplingInputs, features: SamplingFeatures) -> tuple[Any, Sampled]:
        """Generate one token for every row. `state` is consumed."""
        rows, total = len(inputs.temperature), len(state.token)
        inputs = jax.tree.map(lambda array: jnp.asarray(_rows(np.asarray(array), total)), inputs)
        traced = self._traced_decode(total, state.slots)
        key = ("decode", total, state.slots, features)
        program = self._get(key, partial(self.next_token, traced, features=features), state, inputs)
        state, sampled = program(self._params, state, inputs)
        return state, _first_rows(sampled, rows)

    def prefill_logits(self, state: Any, tokens: np.ndarray, *, fresh: bool) -> tuple[Any, jax.Array]:
        """Run prompts through the model, and choose no tokens.

        Args:
            state: the batch, as `start` returned it.
            tokens: int32 [batch, width].
            fresh: always true, because prompts are read at once.

        Returns:
            The state, and the logits after each prompt, float32 [batch, vocab].
        """
        assert fresh and isinstance(state, Batch)
        rows, width = tokens.shape
        total = max(rows, self.manner.rows)
        given = (self._placed(_rows(tokens.astype(np.int32), total)), self._placed(_rows(state.start, total)))
        traced = self._traced_prefill(total, width, state.slots)
        function = partial(self._read, traced, slots=state.slots)
        program = self._get(("checked prefill", total, width, state.slots), function, *given, out=(self._seen, None))
        logits, after = program(self._params, *given)
        return after, logits[:rows, : self.spec.vocab_size]

    def decode_logits(
        self, state: Any, tokens: jax.Array, rows: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """Run one token of every row through the model, and choose none. `state` is consumed.

        Args:
            state: the state before these tokens.
            tokens: int32 [batch].
            rows: int32 [batch], the earlier row that each row continues; None where each continues itself.

        Returns:
            The state, and the logits, float32 [batch, vocab].

        Raises:
            UnsupportedError: rows that continue others, where the rows of the cache are not known.
        """
        count, total = len(tokens), len(state.token)
        if rows is not None:
            state = self._of_rows(state, jnp.asarray(_rows(np.asarray(rows), total)))
        logits, state = self.checked_decode(_rows(np.asarray(tokens), total), state)
        return state, logits[:count, : self.spec.vocab_size]

    def logits(self, tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        """Compute the logits [batch, seq, vocab] of whole sequences without a cache.

        Args:
            tokens: int32 [batch, seq].
            positions: int32 [batch, seq], negative for padding.

        Raises:
            UnsupportedError: padding, for a model that cannot be padded.
        """
        if not self.manner.pads and (positions < 0).any():
            raise UnsupportedError(
                f"texts with padding were given, but {type(self.steps.model).__name__} computes something else for "
                "them: pass texts of one length, or one after another."
            )
        rows = len(tokens)
        total = max(rows, self.manner.rows)
        tokens, positions = _rows(tokens, total), _rows(positions, total)
        key = ("logits", *tokens.shape)
        if key not in self._programs:
            traced = self.steps.logits(*tokens.shape)
            self._get(key, lambda params, *given: traced(params, *given)[0], tokens, positions, out=self._seen)
        return self._programs[key](self._params, tokens, positions)[:rows]

    def hidden_states(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[jax.Array, ...]:
        """Not known of a stock model; tokens and positions are [batch, seq], as would be each result, [batch, seq,
        hidden].

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"hidden states were asked for, but {type(self.steps.model).__name__} runs without a plugin, as a whole: "
            "leave out output_hidden_states."
        )

    def checked_alone(self, tokens: np.ndarray) -> jax.Array:
        """The logits [rows, vocab] after texts tokens [rows, width] when the model is given nothing else."""
        key = ("checked alone", *tokens.shape)
        given = self._placed(tokens)
        if key not in self._programs:
            traced = self.steps.alone(*tokens.shape)
            self._get(key, lambda params, each: traced(params, each)[0], given, out=self._seen)
        found: jax.Array = self._programs[key](self._params, given)
        return found

    def checked_prefill(self, tokens: np.ndarray, start: int, slots: int) -> tuple[jax.Array, StockState]:
        """The logits [rows, vocab] after prompts tokens [rows, width], of which the first `start` are padding, and the
        state, for a check of the model against itself."""
        rows, width = tokens.shape
        traced = self._traced_prefill(rows, width, slots)
        given = (self._placed(tokens), self._placed(np.full(rows, start, np.int32)))
        function = partial(self._read, traced, slots=slots)
        program = self._get(("checked prefill", rows, width, slots), function, *given, out=(self._seen, None))
        found: tuple[jax.Array, StockState] = program(self._params, *given)
        return found

    def checked_decode(self, token: np.ndarray, state: StockState) -> tuple[jax.Array, StockState]:
        """The logits [rows, vocab] after one more token [rows], and the state. The state that is given is consumed."""
        state = replace(state, token=jax.device_put(token, state.token.sharding))
        function = partial(self._advance, self._traced_decode(len(token), state.slots))
        program = self._get(("checked decode", len(token), state.slots), function, state)
        state, logits = program(self._params, state)
        return logits, state

    def _of_rows(self, state: StockState, rows: jax.Array) -> StockState:
        """The state of a new batch whose row i was row `rows[i]`. Numbers in a cache belong to all rows."""
        strange = [array.shape for array in state.cache if array.ndim and (array.ndim < 2 or len(array) != len(rows))]
        if strange:
            raise UnsupportedError(
                f"beam search was asked for, but the cache of {type(self.steps.model).__name__} has tensors of shape "
                f"{strange[0]} that may not be divided into its {len(rows)} rows: leave out num_beams."
            )

        def taken(array: jax.Array) -> jax.Array:
            return jax.device_put(array[rows], array.sharding) if array.ndim else array

        return replace(state, cache=tuple(map(taken, state.cache)), start=taken(state.start))

    def _jit(self, function: Any, first: Any, out: Any = None) -> Any:
        """Jit, with a state donated and handed back in the shardings in which it came; `out`: the shardings of what a
        function without state returns."""
        if not isinstance(first, StockState):
            return jax.jit(function, out_shardings=out)
        shardings = jax.tree.map(lambda array: array.sharding, first)
        return jax.jit(function, donate_argnums=1, out_shardings=(shardings, self.placement.whole()))

    def _traced_prefill(self, rows: int, width: int, slots: int) -> Traced:
        key = (rows, width, slots)
        if key not in self._prefills:
            self._prefills[key] = self.steps.prefill(*key)
        return self._prefills[key].program

    def _traced_decode(self, rows: int, slots: int) -> Traced:
        if (rows, slots) not in self._decodes:
            prefills = self._prefills.items()
            prefill = next(each for (count, _, size), each in prefills if (count, size) == (rows, slots))
            self._decodes[rows, slots] = self.steps.decode(prefill, rows, slots)
        return self._decodes[rows, slots]

    def _read(
        self, traced: Traced, params: Params, tokens: jax.Array, start: jax.Array, *, slots: int
    ) -> tuple[jax.Array, StockState]:
        """Read prompts: the logits after them, and the state."""
        logits, *cache = traced(params, tokens, start)
        zeros = jnp.zeros(len(tokens), jnp.int32)
        cache = [constrain_cache(self.placement, array) for array in cache]
        return logits, StockState(tuple(cache), start, jnp.int32(tokens.shape[1]), zeros, zeros, None, slots)

    def _advance(self, traced: Traced, params: Params, state: StockState) -> tuple[StockState, jax.Array]:
        """Read the last token of each row: the state, and the logits after it."""
        counts = None if state.counts is None else update(state.counts, state.token)
        logits, *cache = traced(params, state.token[:, None], state.start, state.length, *state.cache)
        state = replace(state, cache=tuple(cache), length=state.length + 1, step=state.step + 1, counts=counts)
        return state, logits

    def first_token(
        self,
        traced: Traced,
        params: Params,
        tokens: jax.Array,
        start: jax.Array,
        inputs: SamplingInputs,
        counts: TokenCounts | None,
        *,
        slots: int,
        features: SamplingFeatures,
    ) -> tuple[StockState, Sampled]:
        """Read prompts by a traced prefill, and sample a token for each. For use inside jit.

        Args:
            traced: the prefill.
            params: name → array.
            tokens: int32 [rows, width], padded on the left.
            start: int32 [rows], the first slot of each row that is not padding.
            inputs: the sampling parameters of each row.
            counts: of the prompts' tokens, or None.
            slots: of the cache.
            features: the sampling features that any row uses.
        """
        logits, state = self._read(traced, params, tokens, start, slots=slots)
        return self._sampled(logits, replace(state, counts=counts), inputs, features)

    def next_token(
        self,
        traced: Traced,
        params: Params,
        state: StockState,
        inputs: SamplingInputs,
        *,
        features: SamplingFeatures,
    ) -> tuple[StockState, Sampled]:
        """Read the last token of each row by a traced decoding, and sample the next. For use inside jit.

        Args:
            traced: the decoding.
            params: name → array.
            state: after the tokens before.
            inputs: the sampling parameters of each row.
            features: the sampling features that any row uses.
        """
        state, logits = self._advance(traced, params, state)
        return self._sampled(logits, state, inputs, features)

    def _sampled(
        self, logits: jax.Array, state: StockState, inputs: SamplingInputs, features: SamplingFeatures
    ) -> tuple[StockState, Sampled]:
        sampled = sample(logits[:, : self.spec.vocab_size], inputs, state.counts, state.step, features)
        return replace(state, token=sampled.token), sampled

    def _placed(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, batch_sharding(self.placement, len(array), array.ndim))


def _rows(array: np.ndarray, rows: int) -> np.ndarray:
    """The array with its last row repeated, so that it has this many."""
    missing = rows - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing > 0 else array


def _first_rows(sampled: Sampled, rows: int) -> Sampled:
    return jax.tree.map(lambda array: array[:rows], sampled)
