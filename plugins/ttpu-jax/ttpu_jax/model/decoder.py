"""The decoder that all model families share. It takes tokens and an optional cache, and returns logits and the updated
cache. Unrolled layers that are equal share one traced body, which the compiler inlines at each call; stacked layers run
in a scan, so that compile time does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerSpec, Parameter, axes
from ttpu_core.spec.parameters import stacked_layers
from ttpu_jax.model.cache import KVCache
from ttpu_jax.model.custom import custom_block, custom_embedding
from ttpu_jax.model.embedding import Embedding, Head
from ttpu_jax.model.layer_loop import LayerLoop, layer_loops
from ttpu_jax.model.layers import DecoderLayer, run_layer
from ttpu_jax.model.modules import (
    RESIDUAL,
    LayerInputs,
    Linear,
    Norm,
    Parameters,
    Runtime,
    SharedParam,
    Step,
    Stream,
    WithShortcut,
    into_layers,
    maybe,
    ring_of,
)
from ttpu_jax.model.moe import ExpertLoads, RealTokens
from ttpu_jax.model.step_cache import ContiguousCache, Keys, NoCache, PagedCache, StepCache
from ttpu_jax.ops.attention.api import REFERENCE
from ttpu_jax.ops.kernels import with_adapters
from ttpu_jax.ops.masters import rounded
from ttpu_jax.ops.paged_attention import RaggedBatch
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.ops.rope import rope_angles
from ttpu_jax.ops.saved import policy_of

Caches = tuple[Any, ...]
"""What is kept of each layer between steps: `LayerCache`, `StateCache`, `PagedKV` or None."""

Loads = list[jax.Array]
"""`ExpertLoads` summed over the tokens of each layer of a group, [layers, 2, experts]; empty if not asked for."""

Bind = Callable[[Any, jax.Array | None], StepCache]
"""From what is kept of a layer, and its index among stacked ones, to its cache during this step."""


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head over a flat dict of parameters.

    Args:
        spec: the architecture, padded for the mesh.
        arrays: Flax path → array. Stacked parameters have paths `groups.<g>.<position>.…` and a leading layers axis
            (`ttpu_core.mapping.stack_layers`); others have paths `layers.<i>.…`.
        table: Flax path → shape and logical axes.
        runtime: the placement of arrays and the attention implementation.
        stacked: the parameters are stacked, and a scan runs over the layers.
        remat: what the backward pass computes again, see `ttpu_core.sharding.training_state.REMATS`.
    """

    def __init__(
        self,
        spec: ArchitectureSpec,
        arrays: Mapping[str, jax.Array],
        table: Mapping[str, Parameter],
        runtime: Runtime,
        *,
        stacked: bool = False,
        remat: str = "none",
    ) -> None:
        self.spec, self.runtime, self.stacked, self.remat = spec, runtime, stacked, remat
        values = Parameters(arrays, table)
        embedding = custom_embedding if spec.embedding.custom else Embedding
        self.embed = embedding(spec.embedding, values.at("embed"), runtime)
        self.layers = nnx.List(
            (custom_block if layer.block.custom else DecoderLayer)(layer, values.of_layer(path, layer), runtime)
            for path, layer in _layer_paths(spec, stacked=stacked)
        )
        final, fuses = spec.final_norm, runtime.fuses_norms
        self.final_norm = Norm(final, values.at("final_norm"), by_feature=fuses) if final else None
        projected = spec.embedding.table_features is not None
        self.final_projection = Linear(values.at("final_projection"), runtime) if projected else None
        self.head = Head(spec.head, values.at("head"), runtime)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """Compute the logits of the next token.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding; None with a cache, which determines the positions.
            cache: keys and values of earlier tokens; None to run without a cache.
            last_only: return the logits of the last token only, [batch, 1, vocab].
            fresh: the cache is empty, so attention reads the keys and values of these tokens instead of the cache.

        Returns:
            float32 logits [batch, seq, vocab], and the cache with these tokens in it. Where a mesh pads the vocabulary,
                the last axis also has the padding rows of the embedding table; their logits are -inf.

        Raises:
            RequestError: neither positions nor a cache is given.
        """
        x, cache = self.hidden(tokens, positions, cache, last_only=last_only, fresh=fresh)
        return self.logits(x), cache

    def logits(self, x: jax.Array) -> jax.Array:
        """Return float32 logits [batch, seq, vocab] for the output of `hidden`, x [batch, seq, hidden].

        Where a mesh pads the vocabulary, the last axis also has the padding rows of the embedding table; their logits
        are -inf.
        """
        return _without_padding(self.head(x, self.embed.embedding), self.spec)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """Return the residual stream after the final norm, [batch, seq, hidden], and the cache with these tokens in it.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding; None with a cache, which determines the positions.
            cache: keys and values of earlier tokens; None to run without a cache.
            last_only: return the last token only, [batch, 1, hidden].
            fresh: the cache is empty, so attention reads the keys and values of these tokens instead of the cache.

        Raises:
            RequestError: neither positions nor a cache is given.
        """
        seq = tokens.shape[1]
        positions, lengths, bind = _bound(tokens, positions, cache, fresh=fresh)
        step = Step(positions, self._angles(positions, lengths))
        held = (None,) * len(self.layers) if cache is None else cache.layers
        x, layer_caches, _ = self._through_layers(
            tokens, step, held, bind, last_only=last_only and seq > 1, alone=fresh and cache is not None
        )
        if cache is not None:
            cache = replace(cache, layers=layer_caches, length=cache.length + seq)
        if last_only:
            x = x[:, -1:]
        return self.finished(x), cache

    def packed(
        self, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None, *, routing: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run rows that may hold several sequences each, without a cache.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], from 0 in each sequence; negative for padding.
            segments: int32 [batch, seq], the sequence of each token in its row, from 1; 0 for padding. Tokens attend to
                their own sequence alone. None: each row holds one.
            routing: return the loads of experts too.

        Returns:
            The residual stream after the final norm [batch, seq, hidden], and `ExpertLoads` summed over the tokens of
                each layer of experts, float32 [layers, 2, experts]; None if not asked for or without experts.

        Raises:
            UnsupportedError: segments for a model whose recurrent mixers do not reset their states.
        """
        step = self._step(positions, segments, routing=routing)
        nothing = NoCache(positions, segments=segments)
        x, _, loads = self._through_layers(tokens, step, (None,) * len(self.layers), lambda *_: nothing)
        return self.finished(x), jnp.concatenate(loads) if loads else None

    def hidden_states(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        """Return what goes into each layer, and the stream after the final norm: [batch, seq, hidden] each, one more
        than there are layers. A layer that leaves something for behind the next one counts as one with it.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding.

        Raises:
            UnsupportedError: the layers are stacked, or pass several streams on.
        """
        if self.stacked:
            raise UnsupportedError(
                "hidden states were asked for, but this decoder scans over stacked layers, which keeps none: make the "
                "model with stacked=False."
            )
        step = self._step(positions, None, routing=False)
        nothing, seen = NoCache(positions), list[jax.Array]()
        x, _, _ = self._through_layers(tokens, step, (None,) * len(self.layers), lambda *_: nothing, seen=seen)
        if x.ndim > 3:
            raise UnsupportedError(
                "hidden states were asked for, but the layers of this model pass several streams on, of which "
                "transformers has no common form: leave it out."
            )
        return (*seen, self.finished(x))

    def embedded(
        self, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None, *, routing: bool = False
    ) -> tuple[jax.Array, Step]:
        """What goes into the first layer: the stream [batch, seq, hidden], and what all layers share, whose arrays have
        a leading axis of rows.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], as for `packed`.
            segments: [batch, seq], as for `packed`.
            routing: layers return the loads of experts.
        """
        step = self._step(positions, segments, routing=routing)
        x, _ = self.embed(tokens, positions)
        return self.runtime.placement.constrain(x, *RESIDUAL), step

    def part(self, x: jax.Array, step: Step) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run x [batch, seq, hidden] through the stacked layers of the only group, of which the arrays may hold any
        number. Returns the stream behind them and the loads of experts, each [layers, 2, experts], if asked for."""
        (group,) = self.spec.groups()
        split = [_split(layer) for layer in self.layers]
        nothing = NoCache(step.query_positions, segments=step.segments)
        apply: Any = _run_layer
        if self.remat != "none":
            apply = _recomputed(_run_layer, self.remat, (0,), prevent_cse=False)

        def unit(x: jax.Array, states: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            loads = []
            for (definition, common, _), state, layer in zip(split, states, group.unit, strict=True):
                whole = nnx.merge_state(common, state)
                x, _, _, load = apply(definition, whole, x, step, nothing, _inputs(layer, {}, None))
                loads.append(load)
            return x, tuple(load for load in loads if load is not None)

        found: tuple[jax.Array, tuple[jax.Array, ...]] = jax.lax.scan(unit, x, tuple(state for _, _, state in split))
        return found

    def finished(self, x: jax.Array) -> jax.Array:
        """The final norm of `x` [batch, seq, hidden], the stream behind the last layer, and what leads from it to the
        head: [batch, seq, `EmbeddingSpec.features`]."""
        x = maybe(self.final_norm, self.embed.collapse(x))
        return x if self.final_projection is None else self.final_projection(x)

    def _step(self, positions: jax.Array, segments: jax.Array | None, *, routing: bool) -> Step:
        angles = self._angles(positions, positions.max(axis=1) + 1)
        if segments is not None and any(rope.depends_on_length for rope in self.runtime.ropes):
            angles = self._angles_by_segment(positions, segments)
        return Step(positions, angles, segments=segments, routing=routing)

    def ragged(self, tokens: jax.Array, batch: RaggedBatch, caches: Caches) -> tuple[jax.Array, Caches]:
        """Run one step of many sequences of different lengths over paged caches (`ttpu_jax.model.paged`).

        Args:
            tokens: [tokens], the tokens of all sequences one after another, then padding.
            batch: the sequence of each token, and the page table of each sequence.
            caches: one cache per layer.

        Returns:
            The residual stream after the final norm [tokens, hidden], and the caches with these tokens in them.

        Raises:
            UnsupportedError: the layers are stacked.
        """
        if self.stacked:
            raise UnsupportedError(
                "a step over pages was asked for, but this decoder scans over stacked layers, whose pages would be "
                "copied in every turn: make the model with stacked=False."
            )
        positions = batch.positions[None]
        # A token's own sequence decides on its angles, so each is a batch of its own for that.
        angles = self._angles(batch.positions[:, None], batch.lengths)
        turned = tuple((cos.swapaxes(0, 1), sin.swapaxes(0, 1)) for cos, sin in angles)
        step = Step(positions, turned, batch.adapters)
        placement, kernels = self.runtime.placement, self.runtime.attention != REFERENCE.name
        in_ring = ring_of(jax.ShapeDtypeStruct((*positions.shape, self.spec.hidden_size), np.float32), self.runtime)
        x, caches, _ = self._through_layers(
            tokens[None],
            step,
            caches,
            lambda held, _: PagedCache(held, batch, placement, kernels, in_ring=in_ring is not None),
        )
        return self.finished(x)[0], caches

    def _through_layers(
        self,
        tokens: jax.Array,
        step: Step,
        caches: Caches,
        bind: Bind,
        *,
        last_only: bool = False,
        alone: bool = False,
        seen: list[jax.Array] | None = None,
    ) -> tuple[jax.Array, Caches, Loads]:
        """The stream after the last layer, what is kept of each layer, and the loads that were asked for. `seen`
        receives what goes into each layer, if layers are not stacked. `alone`: tokens attend to one another, and to
        nothing in a cache."""
        x, beside = self.embed(tokens, step.query_positions)
        x = into_layers(x, self.runtime)
        if self.stacked:
            return self._scan_layers(x, step, caches, bind, beside)
        loops = {}
        if alone and beside is None:
            loops = layer_loops(self.spec, list(self.layers), x, self.runtime, last_only=last_only)
        return self._unroll_layers(x, step, caches, bind, beside, loops, last_only=last_only, seen=seen)

    def _angles_by_segment(
        self, positions: jax.Array, segments: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """`_angles` of positions [batch, seq] where the length of a token's own sequence decides on its frequencies."""
        rows = jnp.arange(len(segments))[:, None]
        longest = jnp.zeros((len(segments), segments.shape[1] + 1), positions.dtype).at[rows, segments].max(positions)
        angles = self._angles(positions.reshape(-1, 1), longest[rows, segments].reshape(-1) + 1)
        return tuple((cos.reshape(*segments.shape, -1), sin.reshape(*segments.shape, -1)) for cos, sin in angles)

    def _angles(self, positions: jax.Array, lengths: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """cos and sin of each rope."""
        by_feature = self.runtime.rotates_by_product

        @part(Part.ROPE)
        def angles() -> tuple[tuple[jax.Array, jax.Array], ...]:
            return tuple(rope_angles(rope, positions, lengths, by_feature=by_feature) for rope in self.runtime.ropes)

        if self.runtime.placement.platform == "tpu":
            return jax.lax.optimization_barrier(angles())  # else XLA would compute them anew in every layer
        if self.runtime.placement.platform != "cpu":
            return angles()
        # XLA:CPU would too, for each feature of each head, and ignores barriers. It fuses nothing out of a conditional;
        # this one is always true, but not to the compiler.
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(angles))
        found: tuple[tuple[jax.Array, jax.Array], ...] = jax.lax.cond(lengths.max() > 0, angles, lambda: nothing)
        return found

    def _unroll_layers(
        self,
        x: jax.Array,
        step: Step,
        caches: Caches,
        bind: Bind,
        beside: jax.Array | None,
        loops: Mapping[int, LayerLoop],
        *,
        last_only: bool,
        seen: list[jax.Array] | None,
    ) -> tuple[jax.Array, Caches, Loads]:
        updated: list[Any] = []
        loads: list[jax.Array] = []
        shared: dict[int, Keys] = {}
        embedding = x
        for index, layer in enumerate(self.layers):
            if index in loops:
                x, kept = loops[index](x, step)
                updated += [
                    bind(held, None).write(*each)[0].held for held, each in zip(caches[index:], kept, strict=False)
                ]
            if index < len(updated):  # it was in the loop
                continue
            definition, state = nnx.split(layer)
            if seen is not None and not isinstance(x, WithShortcut):
                seen.append(x)
            if last_only and index == len(self.layers) - 1:  # of what it computes, only the last token's is read
                step = replace(step, last_only=True)
            inputs = _inputs(layer.spec, shared, None if beside is None else beside[index], embedding)
            is_source = index in self.spec.kv_sources
            apply = _apply_layer if self.remat == "none" else _recomputed(_apply_layer, self.remat, (0, 1))
            x, held, keys, load = apply(definition, is_source, state, x, step, bind(caches[index], None), inputs)
            if keys is not None:
                shared[index] = keys
            if load is not None:
                loads.append(load[None])
            updated.append(held)
        return x, tuple(updated), loads

    def _scan_layers(
        self, x: jax.Array, step: Step, caches: Caches, bind: Bind, beside: jax.Array | None
    ) -> tuple[jax.Array, Caches, Loads]:
        """One scan per group of repeated layers, its caches carried whole and written a row at a time."""
        updated: list[Any] = []
        loads: list[jax.Array] = []
        shared: dict[int, Keys] = {}
        whole = not any(self.runtime.placement.axes_of(axis) for axis in (axes.QKV, axes.HEAD_DIM))
        merges = self.runtime.cuts_stream and whole
        place, embedding = 0, x
        for group in self.spec.groups():
            places = range(place, place + len(group.unit))
            place += len(group.unit)
            split = [_split(self.layers[i]) for i in places]
            stacks = tuple(state for _, _, state in split)
            start = group.start
            last: list[Keys | None] = []
            once = group.repeats == 1
            apply: Any = _run_layer
            if self.remat != "none":
                apply = _recomputed(_run_layer, self.remat, (0,), prevent_cse=once)

            def body(
                carry: Any,
                inputs: Any,
                group: Any = group,
                split: Any = split,
                stacks: Any = stacks,
                last: Any = last,
                apply: Any = apply,
            ) -> tuple[Any, Any]:
                x, held = carry
                layer_index, states = inputs
                states = _apart(states, stacks)
                after, of_unit = [], []
                for number, ((definition, common, _), state, kept) in enumerate(zip(split, states, held, strict=True)):
                    index = group.start + layer_index * len(group.unit) + number
                    given = _inputs(group.unit[number], shared, None if beside is None else beside[index], embedding)
                    whole_state = nnx.merge_state(common, state)
                    x, kept, keys, load = apply(definition, whole_state, x, step, bind(kept, layer_index), given)
                    after.append(kept)
                    last.append(keys)
                    of_unit.append(load)
                return (x, tuple(after)), tuple(of_unit)

            states = stacks
            if merges and not once:
                states = tuple(_merged(stack) for stack in stacks)
            carry = x, tuple(caches[i] for i in places)
            if once:  # its keys and values may be wanted outside, where a loop's could not be had
                (x, held), found = body(carry, (jnp.int32(0), jax.tree.map(lambda array: array[0], states)))
                found = jax.tree.map(lambda load: load[None], found)
                sources = self.spec.kv_sources
                shared.update({start + i: keys for i, keys in enumerate(last) if keys and start + i in sources})
            else:
                (x, held), found = jax.lax.scan(body, carry, (jnp.arange(group.repeats), states))
            updated.extend(held)
            loads.extend(jax.tree.leaves(found))
        return x, tuple(updated), loads


def head_logits(
    spec: ArchitectureSpec, ends: Mapping[str, Any], table: Mapping[str, Parameter], runtime: Runtime, x: jax.Array
) -> jax.Array:
    """`Decoder.logits` from the parameters that it reads alone.

    Args:
        spec: the architecture, padded for the mesh.
        ends: path → array, of the head and, where they are tied, the embedding. Their vocabulary may have more padding.
        table: path → shape and logical axes, of these.
        runtime: the placement of arrays.
        x: [batch, seq, hidden].
    """
    values = Parameters(ends, table)
    head = Head(spec.head, values.at("head"), runtime)
    return _without_padding(head(x, values.get("embed.embedding")), spec)


def _without_padding(logits: jax.Array, spec: ArchitectureSpec) -> jax.Array:
    """float32 logits [..., rows]: -inf for rows that are no words."""
    if logits.shape[-1] == spec.vocab_size:
        return logits
    # Masked where they are made: a slice would leave the devices parts of different sizes.
    rows = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(rows < spec.vocab_size, logits, -jnp.inf)


def _bound(
    tokens: jax.Array, positions: jax.Array | None, cache: KVCache | None, *, fresh: bool
) -> tuple[jax.Array, jax.Array, Bind]:
    """Positions [batch, seq] and lengths [batch] of the rows of tokens [batch, seq], and what binds a layer's cache.

    Raises:
        RequestError: neither positions nor a cache say where the tokens are.
    """
    if cache is not None:
        own, of_slots = cache.positions(tokens.shape[1])
        positions, key_positions, slot = own, own if fresh else of_slots, cache.length
        return (
            positions,
            cache.lengths(tokens.shape[1]),
            lambda held, layer_index: ContiguousCache(held, key_positions, slot, layer_index, cache.slots, fresh),
        )
    if positions is None:
        raise RequestError(
            "a model was given tokens without their positions and without a cache, of which one must say where they "
            "are: pass positions [batch, seq]."
        )
    nothing = NoCache(positions)
    return positions, positions.max(axis=1) + 1, lambda held, layer_index: nothing


@partial(jax.jit, static_argnums=(0, 1))
def _apply_layer(
    definition: Any, is_source: bool, state: Any, x: Stream, step: Step, cache: StepCache, inputs: LayerInputs
) -> tuple[Stream, Any, Keys | None, jax.Array | None]:
    """`_run_layer`, with keys that others read. Layers with equal definitions and shapes hit jit's cache and are traced
    once."""
    x, held, keys, load = _run_layer(definition, state, x, step, cache, inputs)
    return x, held, keys if is_source else None, load


def _run_layer(
    definition: Any, state: Any, x: Stream, step: Step, cache: StepCache, inputs: LayerInputs
) -> tuple[Stream, Any, Keys | None, jax.Array | None]:
    """One layer, its master weights rounded and its adapted kernels bound to the tokens' adapters: the stream, what is
    kept of it, its keys, and the loads of its experts [2, experts] over all tokens but padding, if they are asked
    for."""
    layer = nnx.merge(definition, with_adapters(rounded(state), step.adapters))
    layer.set_attributes(real_tokens=RealTokens(step.wanted.valid), raise_if_not_found=False)
    if not step.routing:
        x, cache, keys = run_layer(layer, x, step, cache, inputs)
        return x, cache.held, keys, None
    layer.set_attributes(keeps_loads=True, raise_if_not_found=False)
    x, cache, keys = run_layer(layer, x, step, cache, inputs)
    kept = jax.tree.leaves(nnx.pop(layer, ExpertLoads))
    load = jnp.where(step.valid[..., None], kept[0], 0).sum((1, 2)) if kept else None
    return x, cache.held, keys, load


def _recomputed(apply: Any, remat: str, static: tuple[int, ...], *, prevent_cse: bool = True) -> Any:
    """A layer whose activations are computed again in the backward pass, but for what `remat` keeps."""
    return jax.checkpoint(apply, policy=policy_of(remat), static_argnums=static, prevent_cse=prevent_cse)


def _split(layer: nnx.Module) -> tuple[Any, Any, Any]:
    """A layer's definition, the parameters that it shares with other layers, and its own."""
    parts: Any = nnx.split(layer, SharedParam, ...)
    definition, common, own = parts
    return definition, common, own


def _inputs(
    layer: LayerSpec, shared: Mapping[int, Keys], beside: jax.Array | None, embedding: jax.Array | None = None
) -> LayerInputs:
    """What a layer is given beside the stream; `shared` are the keys and values of the layers that others read."""
    source = layer.mixer.kv_from_layer if isinstance(layer.mixer, AttentionSpec) else None
    keys = None if source is None else shared[source]
    return LayerInputs(keys, beside, embedding if layer.block.reads_embedding else None)


def _layer_paths(spec: ArchitectureSpec, *, stacked: bool) -> Iterator[tuple[str, Any]]:
    if not stacked:
        yield from ((f"layers.{index}", layer) for index, layer in enumerate(spec.layers))
        return
    yield from ((prefix, layer) for prefix, layer, _ in stacked_layers(spec))


def _merged(state: Any) -> Any:
    """The state of stacked layers, with fused queries, keys and values [layers, heads, slots, features, in] as
    [layers, outputs, in]: XLA:TPU then reads a layer's where they lie, instead of copying them first."""

    def merge(path: Any, stack: jax.Array) -> jax.Array:
        fused = stack.ndim == 5 and "qkv" in jax.tree_util.keystr(path)
        return stack.reshape(len(stack), -1, stack.shape[-1]) if fused else stack

    return jax.tree_util.tree_map_with_path(merge, state)


def _apart(states: Any, stacks: Any) -> Any:
    """One layer's states in the shapes that they have in the stacks."""
    return jax.tree.map(lambda part, stack: part.reshape(stack.shape[1:]), states, stacks)
