"""Samples the tokens of a step on the device, by request slot. It takes the logits of the step's rows and one small
array of the requests' sampling parameters, and returns tokens and log-probabilities; the tokens also stay on the device
for the next step.

The sampler is compiled apart from the model, so that different sampling parameters do not multiply the model's
programs. It has three levels for each number of rows, and a step uses the lowest level that serves all of its rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_jax.ops.sampling import (
    LogitRules,
    Sampled,
    SamplingFeatures,
    SamplingInputs,
    TokenCounts,
    sample,
)

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_FIELDS = ("slot", "step", "seed", "top_k", *_FLOATS)
FIELDS = {name: index for index, name in enumerate(_FIELDS)}
"""Rows of the array [fields, rows] that a step's requests become; floats and seeds as their bits."""


class Level(enum.IntEnum):
    """The features of a sampler program."""

    GREEDY = 0
    DRAW = 1
    """Temperature, top-k, top-p, min-p."""
    ALL = 2
    """Penalties, biases, forbidden tokens and log-probabilities too."""


def column(params: SamplingParams, slot: int) -> np.ndarray:
    """Encode a request's sampling parameters as int32 [fields]; the runner adds the step number to it later."""
    values = np.zeros(len(_FIELDS), np.int32)
    values[FIELDS["slot"]] = slot
    values[FIELDS["seed"]] = np.uint32(params.with_seed().seed or 0).view(np.int32)
    values[FIELDS["top_k"]] = min(params.top_k, 2**31 - 1)
    floats = (
        0.0 if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    values[-len(_FLOATS) :] = np.array(floats, np.float32).view(np.int32)
    return values


BLOCK_ROWS = 64
"""Rows that are sampled at once: filters take several times the memory of the logits that they are given."""
NEUTRAL = column(SamplingParams(temperature=0.0, seed=0), 0)
"""The column of a row of no request."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The sampler's state on the device between steps.

    Attributes:
        last_tokens: int32 [slots], the last sampled token of each slot; the last slot belongs to no request.
        counts: token counts by slot where penalties are served, else None.
    """

    last_tokens: jax.Array
    counts: TokenCounts | None


def sample_rows(
    logits: jax.Array,
    state: SamplerState,
    requests: jax.Array,
    rules: LogitRules | None,
    *,
    level: Level,
    max_logprobs: int,
) -> tuple[SamplerState, Sampled]:
    """Sample one token for every row, and store it in the row's slot of `last_tokens`.

    Args:
        logits: [rows, vocab].
        state: the sampler's state before this step.
        requests: int32 [fields, rows], the columns that `column` makes; rows of no request name the last slot.
        rules: biases and allowed tokens of each row; read at the highest level only.
        level: the features that the rows need.
        max_logprobs: how many of the likeliest tokens to report beside each chosen one.
    """
    slots = requests[FIELDS["slot"]]
    some = partial(_sample_block, state=state, level=level, max_logprobs=max_logprobs)
    rows = len(logits)
    if level is Level.GREEDY or rows <= BLOCK_ROWS:
        sampled = some(logits, requests, rules)
    else:
        sampled = _in_blocks(some, rows, logits, requests, rules)
    updated = state.counts
    if level is Level.ALL and state.counts is not None:
        at = jnp.where(sampled.token < 0, logits.shape[1], sampled.token)
        output = state.counts.output_counts.at[slots, at].add(1, mode="drop")
        updated = TokenCounts(state.counts.prompt_seen, output)
    return SamplerState(state.last_tokens.at[slots].set(sampled.token), updated), sampled


def _in_blocks(
    some: Callable[..., Sampled], rows: int, logits: jax.Array, requests: jax.Array, rules: LogitRules | None
) -> Sampled:
    """`some` of `BLOCK_ROWS` rows after another. The last block ends with the last row, and begins among those of the
    one before where rows do not divide: padding would be a copy of the logits."""

    def block(start: jax.Array) -> Sampled:
        def part(array: jax.Array, axis: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, BLOCK_ROWS, axis)

        return some(part(logits), part(requests, 1), jax.tree.map(part, rules))

    whole = rows // BLOCK_ROWS * BLOCK_ROWS
    starts = [*range(0, whole, BLOCK_ROWS), *([rows - BLOCK_ROWS] if whole < rows else [])]
    each = jax.lax.map(block, jnp.array(starts, jnp.int32))

    def joined(array: jax.Array) -> jax.Array:
        flat = array.reshape(-1, *array.shape[2:])
        return flat if whole == rows else jnp.concatenate([flat[:whole], flat[whole - rows :]])

    result: Sampled = jax.tree.map(joined, each)
    return result


def _sample_block(
    logits: jax.Array,
    requests: jax.Array,
    rules: LogitRules | None,
    *,
    state: SamplerState,
    level: Level,
    max_logprobs: int,
) -> Sampled:
    """One token for every row, each of its own numbers alone."""

    def floats(name: str) -> jax.Array:
        return jax.lax.bitcast_convert_type(requests[FIELDS[name]], jnp.float32)

    slots = requests[FIELDS["slot"]]
    inputs = SamplingInputs(
        temperature=floats("temperature"),
        top_k=requests[FIELDS["top_k"]],
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        repetition=floats("repetition"),
        presence=floats("presence"),
        frequency=floats("frequency"),
        seed=jax.lax.bitcast_convert_type(requests[FIELDS["seed"]], jnp.uint32),
    )
    counts = None
    features = SamplingFeatures()
    if level is Level.DRAW:
        features = SamplingFeatures(sample=True, top_k=True, top_p=True, min_p=True)
    elif level is Level.ALL:
        features = SamplingFeatures(True, True, True, True, state.counts is not None, max_logprobs)
        if state.counts is not None:
            counts = TokenCounts(state.counts.prompt_seen[slots], state.counts.output_counts[slots])
    return sample(logits, inputs, counts, requests[FIELDS["step"]], features, rules)


def begin_slot(state: SamplerState, slot: jax.Array, prompt: jax.Array, output: jax.Array) -> SamplerState:
    """Give `slot` to a request whose penalties count prompt and output, both int32 [length] padded with -1, and return
    the new state."""
    assert state.counts is not None
    vocab = state.counts.prompt_seen.shape[1]

    def inside(tokens: jax.Array) -> jax.Array:
        return jnp.where(tokens < 0, vocab, tokens)

    seen = jnp.zeros(vocab, jnp.bool_).at[inside(prompt)].set(True, mode="drop")
    times = jnp.zeros(vocab, jnp.int32).at[inside(output)].add(1, mode="drop")
    counts = TokenCounts(state.counts.prompt_seen.at[slot].set(seen), state.counts.output_counts.at[slot].set(times))
    return SamplerState(state.last_tokens, counts)


def empty_rules(rows: int, vocab: int, biases: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make rules [rows, …] without effect: bias tokens, biases, allowed tokens."""
    words = -(-vocab // 32)
    return (
        np.full((rows, biases), -1, np.int32),
        np.zeros((rows, biases), np.float32),
        np.full((rows, words), 0xFFFFFFFF, np.uint32),
    )


def prompt_logprobs(logits_of: Any, hidden: jax.Array, targets: jax.Array, count: int) -> Sampled:
    """The log-probabilities of prompt tokens.

    Args:
        logits_of: hidden [tokens, hidden] → logits [tokens, vocab].
        hidden: [tokens, hidden], of the tokens before the targets.
        targets: int32 [tokens].
        count: likeliest tokens to report beside them.

    Returns:
        `Sampled` with the targets as tokens, made a few rows at a time: all logits at once would be large.
    """

    def some(inputs: tuple[jax.Array, jax.Array]) -> Sampled:
        rows, target = inputs
        logprobs = jax.nn.log_softmax(logits_of(rows).astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
        top_logprobs, top_tokens = jax.lax.top_k(logprobs, count)
        return Sampled(target, chosen, top_tokens, top_logprobs)

    tokens = hidden.shape[0]
    block = min(16, tokens)
    missing = -tokens % block
    padded = jnp.pad(hidden, ((0, missing), (0, 0))), jnp.pad(targets, (0, missing))
    blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), padded)
    result: Sampled = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], jax.lax.map(some, blocks))
    return result
