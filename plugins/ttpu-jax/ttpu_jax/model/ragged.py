"""Runs recurrent mixers on a flat batch of many sequences, whose states lie in slots. The mixer itself sees one row per
sequence, as it does outside the serving engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.model.modules import Step
from ttpu_jax.ops.paged_attention import RaggedBatch

Mixer = Callable[[jax.Array, Step, Mapping[str, jax.Array]], tuple[jax.Array, Any]]


def on_rows(
    mixer: Mixer, x: jax.Array, step: Step, states: Mapping[str, jax.Array], batch: RaggedBatch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Run a mixer on a flat batch, each sequence from its own state.

    Sequences with one token form one batch of rows, and the at most `max_prefills` longer ones another: rows as long as
    the longest sequence would be mostly padding. A sequence that begins in this step starts from zeros, whatever its
    slot holds. Slot 0 takes the state of rows that belong to no sequence.

    Args:
        mixer: the recurrent mixer.
        x: [1, tokens, hidden].
        step: positions and rotary angles of the tokens.
        states: name → [slots, ...], the states of all slots.
        batch: the sequence of each token, and the state slot of each sequence.

    Returns:
        The mixer's output [1, tokens, hidden], and the states of all slots after these tokens.
    """
    starts, counts = batch.query_starts[:-1], jnp.diff(batch.query_starts)
    out, arrays = jnp.zeros_like(x[0]), dict(states)
    out, arrays = _some_rows(mixer, x[0], step, out, arrays, starts, jnp.where(counts == 1, 1, 0), batch.states, 1)
    if batch.max_queries > 1:
        longer = jnp.nonzero(counts > 1, size=batch.max_prefills, fill_value=counts.shape[0] - 1)[0]
        # Fill values repeat the last sequence: those that are not there have nothing to do.
        present = jnp.arange(batch.max_prefills) < (counts > 1).sum()
        lengths = jnp.where(present & (counts[longer] > 1), counts[longer], 0)
        slots = batch.states[longer]
        most = min(batch.max_queries, x.shape[1])
        out, arrays = _some_rows(mixer, x[0], step, out, arrays, starts[longer], lengths, slots, most)
    return out[None], arrays


def _some_rows(
    mixer: Mixer,
    x: jax.Array,
    step: Step,
    out: jax.Array,
    arrays: dict[str, jax.Array],
    starts: jax.Array,
    counts: jax.Array,
    states: jax.Array,
    most: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`out` [tokens, hidden] and the states with what rows of `most` tokens make of them: row i has `counts[i]` tokens
    from `starts[i]` on; one of no tokens changes nothing."""
    tokens = x.shape[0]
    offsets = jnp.arange(most)[None]
    valid = offsets < counts[:, None]
    index = jnp.where(valid, starts[:, None] + offsets, 0)
    positions = jnp.where(valid, step.query_positions[0][index], -1)
    angles = tuple((cos[0][index], sin[0][index]) for cos, sin in step.angles)
    row_step = replace(step, query_positions=positions, angles=angles, adapters=None)
    begins = positions[:, 0] == 0

    def row_states(array: jax.Array) -> jax.Array:
        rows = array[states]
        return jnp.where(begins.reshape(-1, *(1,) * (rows.ndim - 1)), jnp.zeros((), rows.dtype), rows)

    mixed, after = mixer(x[index], row_step, {name: row_states(array) for name, array in arrays.items()})
    out = out.at[jnp.where(valid, index, tokens)].set(mixed.astype(out.dtype), mode="drop")
    slots = jnp.where(counts > 0, states, 0)
    return out, {name: array.at[slots].set(after[name].astype(array.dtype)) for name, array in arrays.items()}
