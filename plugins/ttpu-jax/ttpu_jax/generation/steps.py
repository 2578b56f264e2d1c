"""Takes the steps of one call of `generate` on the device: the prompts, then a token of every row. `PlainSteps` chooses
tokens in the model's own programs; `RuledSteps` in a program behind them, with rules, the caller's code and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec.arithmetic import REWOUND
from ttpu_jax.generation.host_calls import HostCalls
from ttpu_jax.generation.programs import Programs, cache_bucket, prompts_seen
from ttpu_jax.generation.prompts import left_pad
from ttpu_jax.ops.sampling import Sampled, SamplingFeatures, SamplingInputs, TokenCounts
from ttpu_jax.ops.token_rules import Memory, TokenRules, chosen, final_scores, ruled


@dataclass(frozen=True)
class Chosen:
    """The tokens of one step, and what was asked for beside them: `scores` after all that changes them, and `logits`,
    float32 [batch, vocab] each."""

    sampled: Sampled
    scores: jax.Array | None = None
    logits: jax.Array | None = None


class Steps(Protocol):
    """The steps of one call. `ahead`: the next step may begin before the host has seen the tokens of this one."""

    @property
    def ahead(self) -> bool:
        """Whether no code of the caller runs between two steps."""
        ...

    def first(self, ids: np.ndarray) -> Chosen:
        """Read the prompts, and choose the first token of every row; ids: int64 [rows, length], the tokens so far, for
        the caller's code."""
        ...

    def next(self, ids: np.ndarray) -> Chosen:
        """Choose one more token of every row; ids: int64 [rows, length], as for `first`."""
        ...


@dataclass(frozen=True)
class Padded:
    """Prompts of one batch, padded on the left: tokens int32 [batch, width], starts int32 [batch] the first real slot
    of each, `slots` the number of slots that a cache needs for them and all new tokens, and `rewound` the most tokens
    that are taken back at once."""

    ids: Sequence[Sequence[int]]
    tokens: np.ndarray
    starts: np.ndarray
    slots: int
    rewound: int = REWOUND

    @classmethod
    def of(cls, programs: Programs, ids: Sequence[Sequence[int]], steps: int, rewound: int = REWOUND) -> Padded:
        """Pad prompts to a length that the programs take, with room for `steps` tokens."""
        width = programs.prompt_width(max(map(len, ids)))
        tokens, starts = left_pad(ids, width)
        slots = cache_bucket(width + steps, programs.runtime.placement.platform)
        return cls(ids, tokens, starts, slots, max(rewound, REWOUND))

    @property
    def width(self) -> int:
        """The padded length."""
        return self.tokens.shape[1]

    def chunks(self, programs: Programs) -> list[np.ndarray]:
        """The parts in which prompts are read, int32 [batch, chunk] each."""
        chunk = min(self.width, programs.prefill_chunk or self.width)
        return [self.tokens[:, at : at + chunk] for at in range(0, self.width, chunk)]

    def memory(self, times: int, counted: int | None) -> Memory:
        """The tokens of the prompts, each `times` times in succession; `counted`: columns of counts, None for none."""
        filler = np.arange(self.width) < self.starts[:, None]
        history = np.full((len(self.ids), self.slots), -1, np.int32)
        history[:, : self.width] = np.where(filler, -1, self.tokens)
        counts = None
        if counted is not None:
            seen = np.repeat(prompts_seen(self.ids, counted), times, axis=0)
            counts = TokenCounts(jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32))
        rows = jnp.asarray(np.repeat(history, times, axis=0))
        return Memory(rows, jnp.int32(self.width), jnp.int32(0), counts)


class PlainSteps:
    """Steps without rules.

    Args:
        programs: the model's compiled programs.
        prompts: of the batch.
        inputs: the sampling parameters of each row.
        features: the sampling features that any row uses.
    """

    ahead = True

    def __init__(
        self, programs: Programs, prompts: Padded, inputs: SamplingInputs, features: SamplingFeatures
    ) -> None:
        self._programs, self._prompts, self._inputs, self._features = programs, prompts, inputs, features
        self._state: Any = None

    def first(self, ids: np.ndarray) -> Chosen:
        """Read the prompts; ids [rows, length] are not read."""
        prompts, programs = self._prompts, self._programs
        seen = prompts_seen(prompts.ids, programs.spec.embedding.rows) if self._features.penalties else None
        state = programs.start(prompts.starts, prompts.width, prompts.slots, seen)
        for index, part in enumerate(prompts.chunks(programs)):
            state, sampled = programs.prefill(state, part, self._inputs, self._features, fresh=index == 0)
        self._state = state
        return Chosen(sampled)

    def next(self, ids: np.ndarray) -> Chosen:
        """Choose one more token of every row; ids [rows, length] are not read."""
        self._state, sampled = self._programs.decode(self._state, self._inputs, self._features)
        return Chosen(sampled)


class RuledSteps:
    """Steps with rules, the caller's processors, or reports of scores.

    Args:
        programs: the model's compiled programs.
        prompts: of the batch.
        times: rows of each prompt.
        inputs: the sampling parameters of each row.
        features: the sampling features that any row uses.
        rules: of the call.
        calls: the caller's code.
        scores: report scores.
        logits: report logits.
    """

    def __init__(
        self,
        programs: Programs,
        prompts: Padded,
        times: int,
        inputs: SamplingInputs,
        features: SamplingFeatures,
        rules: TokenRules,
        calls: HostCalls,
        *,
        scores: bool = False,
        logits: bool = False,
    ) -> None:
        self.ahead = not calls.processors
        self._programs, self._prompts, self._times = programs, prompts, times
        self._inputs, self._features, self._rules, self._calls = inputs, features, rules, calls
        self._scores, self._logits = scores, logits
        self._memory = prompts.memory(times, programs.spec.embedding.rows if features.penalties else None)
        self._state: Any = None
        self._tokens: jax.Array | None = None

    def first(self, ids: np.ndarray) -> Chosen:
        """Read the prompts, and choose the first token of every row; ids: int64 [rows, length], the tokens so far."""
        self._state, logits = prefilled(self._programs, self._prompts, self._times)
        return self._chosen(logits, ids)

    def next(self, ids: np.ndarray) -> Chosen:
        """Choose one more token of every row; ids: int64 [rows, length], the tokens so far."""
        assert self._tokens is not None
        self._state, logits = self._programs.decode_logits(self._state, self._tokens)
        return self._chosen(logits, ids)

    def _chosen(self, logits: jax.Array, ids: np.ndarray) -> Chosen:
        run, features = self._programs.compiled, self._features
        given = (logits, self._memory, self._tokens, self._inputs, self._rules)
        if self._calls.processors:
            self._memory, before = run("rules", partial(_after_rules, features=features), (features,), *given)
            ours = self._calls.processed(ids, np.asarray(before), self._programs.spec.vocab_size)
            rest = (logits, ours, self._memory.step, self._inputs, self._rules)
            sampled, scores = run("choice", partial(_by_scores, features=features), (features,), *rest)
        else:
            function = partial(at_once, features=features)
            self._memory, sampled, scores = run("ruled choice", function, (features,), *given)
        self._tokens = sampled.token
        return Chosen(sampled, scores if self._scores else None, logits if self._logits else None)


def prefilled(programs: Programs, prompts: Padded, times: int) -> tuple[Any, jax.Array]:
    """Read the prompts; returns the state and logits, float32 [rows, vocab], with `times` rows of each prompt."""
    read = 1 if programs.repeats_rows else times
    starts = np.repeat(prompts.starts, read)
    state = programs.start(starts, prompts.width, prompts.slots, rewound=prompts.rewound)
    for index, part in enumerate(prompts.chunks(programs)):
        state, logits = programs.prefill_logits(state, np.repeat(part, read, axis=0), fresh=index == 0)
    if read == times:
        return state, logits
    return programs.repeated(state, times), jnp.repeat(logits, times, axis=0)


def _after_rules(
    logits: jax.Array,
    memory: Memory,
    tokens: jax.Array | None,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
) -> tuple[Memory, jax.Array]:
    memory = memory if tokens is None else memory.appended(tokens)
    return memory, ruled(logits.astype(jnp.float32), memory, inputs, features, rules)


def _by_scores(
    logits: jax.Array,
    scores: jax.Array,
    step: jax.Array,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
) -> tuple[Sampled, jax.Array]:
    scores = final_scores(scores, inputs, features, rules)
    return chosen(logits.astype(jnp.float32), scores, inputs, step, features), scores


def at_once(
    logits: jax.Array,
    memory: Memory,
    tokens: jax.Array | None,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
) -> tuple[Memory, Sampled, jax.Array]:
    """Choose the next token of every row.

    Args:
        logits: float32 [batch, vocab].
        memory: the tokens before `tokens`.
        tokens: int32 [batch], the last ones; None where `memory` has them.
        inputs: the sampling parameters, [batch] each.
        rules: of the call.
        features: the sampling features that any row uses.

    Returns:
        The memory with `tokens`, the choices, and the final scores, float32 [batch, vocab].
    """
    memory, scores = _after_rules(logits, memory, tokens, inputs, rules, features=features)
    return memory, *_by_scores(logits, scores, memory.step, inputs, rules, features=features)
