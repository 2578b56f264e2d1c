"""The gradients of a batch whose microbatches pass the stages of a pipeline by 1F1B (arXiv 2006.09503): the backward
pass of a microbatch begins as soon as it has passed the last stage, so that the activations that stages keep do not
grow with the number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch
from ttpu_jax.model.pipeline import of_stages, run_stages, stages_of


class BehindStages:
    """A model whose layers have run: it has the last stage's stream, and everything else of the model.

    Args:
        model: of the architecture.
        stream: [batch, seq, hidden], behind the last layer.
    """

    def __init__(self, model: DecoderModel, stream: jax.Array) -> None:
        self._model, self._stream = model, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """The stream [batch, seq, hidden] after the final norm.

        Args:
            params: stacked path → array.
            tokens: [batch, seq], the rows that the stream is of; they are not read, nor are the following.
            positions: [batch, seq].
            segments: [batch, seq].
        """
        return self._model.module(params).finished(self._stream)


def gradients_by_1f1b(
    model: DecoderModel,
    loss: Callable[[Any, Params, TokenBatch], LossSums],
    weights: Mapping[str, Any],
    trained: Mapping[str, Any],
    parts: TokenBatch,
    as_given: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]],
) -> tuple[LossSums, dict[str, jax.Array]]:
    """The sums of a loss over all microbatches, and the gradients of its total.

    At tick t, stage s of S runs microbatch t - s forward, and backward microbatch t - 2 (S - 1) + s, for which it
    computes its activations again from its input. It keeps inputs of at most 2 S - 1 microbatches. All ends after
    M + 2 (S - 1) ticks for M microbatches.

    Args:
        model: of the architecture.
        loss: of the rows of a microbatch; it reads the model's layers by one call of `hidden`.
        weights: stacked path → weight, of the whole model.
        trained: those whose gradients are wanted.
        parts: the batch with a leading axis of microbatches; what is shared has none.
        as_given: gradients in the dtype and where they are summed.

    Returns:
        The sums, and the gradient of `LossSums.total` for each trained path.
    """
    stages = stages_of(model.runtime.placement)
    shared, parts = parts.shared, replace(parts, shared={})
    count, last, kept = len(parts.tokens), stages - 1, min(2 * stages - 1, len(parts.tokens))
    places = jnp.arange(stages)
    of_layers, of_ends = of_stages(trained, stages)
    fixed_layers, fixed_ends = of_stages({path: weights[path] for path in weights if path not in trained}, stages)

    def microbatch(number: jax.Array) -> TokenBatch:
        return replace(jax.tree.map(lambda array: array[number], parts), shared=shared)

    def enter(ends: Params, part: TokenBatch) -> tuple[jax.Array, Any]:
        decoder = model.module({**fixed_ends, **_first_of(fixed_layers), **_first_of(of_layers), **ends})
        return decoder.embedded(part.tokens, part.positions, part.segments)

    def leave(ends: Params, stream: jax.Array, part: TokenBatch) -> tuple[jax.Array, LossSums]:
        params = {**fixed_ends, **_first_of(fixed_layers), **_first_of(of_layers), **ends}
        sums = loss(BehindStages(model, stream), params, part)
        return sums.total, sums

    def run(layers: Any, stream: jax.Array, step: Any) -> jax.Array:
        return run_stages(model, {**fixed_layers, **layers}, {**fixed_ends, **of_ends}, stream, step)[0]

    def steps_of(numbers: jax.Array) -> Any:
        """What the layers of each stage share for its microbatch; `numbers` are [stages]."""
        every = jax.vmap(lambda number: enter(of_ends, microbatch(number))[1])
        return every(jnp.clip(numbers, 0, count - 1))

    def tick(carry: Any, number: jax.Array) -> tuple[Any, None]:
        """Carry: the streams that arrive at the stages and the cotangents that do [stages, rows, seq, hidden], the kept
        inputs [stages, kept, rows, seq, hidden], the gradients of layers and of the rest, the sums."""
        arriving, returning, inputs, layer_gradients, end_gradients, sums = carry
        ahead, behind = number - places, number - 2 * last + places

        entering, _ = enter(of_ends, microbatch(jnp.clip(number, 0, count - 1)))
        arriving = jnp.where(_at(places == 0, arriving), entering[None], arriving)
        runs = (ahead >= 0) & (ahead < count)
        inputs = jnp.where(_at(runs, inputs) & _slot(ahead % kept, inputs), arriving[:, None], inputs)
        leaving = run(of_layers, arriving, steps_of(ahead))

        part = microbatch(jnp.clip(number - last, 0, count - 1))
        (end_gradient, cotangent), found = jax.grad(leave, argnums=(0, 1), has_aux=True)(of_ends, leaving[last], part)
        sums, end_gradients = _added(runs[last], (sums, end_gradients), (found, as_given(end_gradient)))

        returning = jnp.where(_at(places == last, returning), cotangent[None].astype(returning.dtype), returning)
        runs = (behind >= 0) & (behind < count)
        own = jnp.where(_slot(behind % kept, inputs), inputs, 0).sum(1).astype(inputs.dtype)
        steps = steps_of(behind)
        _, backward = jax.vjp(lambda layers, stream: run(layers, stream, steps), of_layers, own)
        layer_gradient, returned = backward(jnp.where(_at(runs, returning), returning, 0))
        layer_gradients = jax.tree.map(jnp.add, layer_gradients, as_given(_joined(layer_gradient)))

        first = microbatch(jnp.clip(behind[0], 0, count - 1))
        _, backward = jax.vjp(lambda ends: enter(ends, first)[0], of_ends)
        (end_gradient,) = backward(returned[0])
        _, end_gradients = _added(runs[0], (sums, end_gradients), (sums, as_given(end_gradient)))
        carried = jnp.roll(leaving, 1, axis=0), jnp.roll(returned, -1, axis=0), inputs
        return (*carried, layer_gradients, end_gradients, sums), None

    stream = jax.eval_shape(enter, of_ends, microbatch(jnp.int32(0)))[0]
    sums = jax.eval_shape(leave, of_ends, stream, microbatch(jnp.int32(0)))[1]
    between = jnp.zeros((stages, *stream.shape), stream.dtype)
    start = (
        between,
        between,
        jnp.zeros((stages, kept, *stream.shape), stream.dtype),
        as_given(jax.tree.map(jnp.zeros_like, _joined(of_layers))),
        as_given(jax.tree.map(jnp.zeros_like, of_ends)),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums),
    )
    (*_, layers, ends, sums), _ = jax.lax.scan(tick, start, jnp.arange(count + 2 * last))
    return sums, {**layers, **ends}


def _added(condition: jax.Array, before: Any, more: Any) -> Any:
    return jax.tree.map(lambda one, other: one + jnp.where(condition, other, 0), before, more)


def _at(condition: jax.Array, like: jax.Array) -> jax.Array:
    """A condition [stages] for arrays like `like`, [stages, ...]."""
    return condition.reshape(-1, *(1,) * (like.ndim - 1))


def _slot(slots: jax.Array, inputs: jax.Array) -> jax.Array:
    """bool, of the kept inputs [stages, kept, ...] the slot of each stage [stages]."""
    chosen = slots[:, None] == jnp.arange(inputs.shape[1])[None]
    return chosen.reshape(*chosen.shape, *(1,) * (inputs.ndim - 2))


def _first_of(by_stage: Any) -> Any:
    """The layers of one stage, for a module of which only what is outside of layers runs."""
    return jax.tree.map(lambda array: array[0], by_stage)


def _joined(by_stage: Any) -> Any:
    """[stages, layers / stages, ...] as [layers, ...]."""
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), by_stage)
