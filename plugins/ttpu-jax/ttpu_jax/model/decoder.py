"""The shared decoder, written once for every family. In: tokens, and a cache that may be absent; out: logits and the
updated cache. Equal layers share one traced body: unrolled, each call of it is inlined by the compiler; stacked, a scan
runs over them, so that compile time does not grow with depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_jax.model.cache import KVCache, LayerCache
from ttpu_jax.model.layers import RESIDUAL, DecoderLayer, Embedding, Head, Norm, Parameters, Runtime, Step
from ttpu_jax.ops.rope import rope_angles


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head over a flat dict of parameters.

    `stacked` parameters have paths `groups.<g>.<position>.…` and a leading layers axis
    (`ttpu_core.mapping.stack_layers`); others have paths `layers.<i>.…`."""

    def __init__(
        self,
        spec: ArchitectureSpec,
        arrays: Mapping[str, jax.Array],
        table: Mapping[str, Parameter],
        runtime: Runtime,
        *,
        stacked: bool = False,
    ) -> None:
        self.spec, self.runtime, self.stacked = spec, runtime, stacked
        values = Parameters(arrays, table)
        self.embed = Embedding(spec.embedding, values.at("embed"))
        self.layers = nnx.List(
            DecoderLayer(layer, values.at(path), runtime) for path, layer in _layer_paths(spec, stacked=stacked)
        )
        self.final_norm = Norm(spec.final_norm, values.at("final_norm")) if spec.final_norm else None
        self.head = Head(spec.head, values.at("head"))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """Logits of the next token.

        Args:
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding; None where there is a cache, which knows them.
            cache: where earlier keys and values are, and where these go.
            fresh: the cache is empty, so that attention reads these tokens' own keys and values instead of it.
            last_only: logits of the last token only, [batch, 1, vocab].

        Returns:
            float32 logits [batch, seq, vocab], and the cache with these tokens in it.
        """
        seq = tokens.shape[1]
        if cache is None:
            assert positions is not None
            key_positions = positions
            lengths = positions.max(axis=1) + 1
        else:
            positions, key_positions = cache.positions(seq)
            lengths = cache.lengths(seq)
            key_positions = positions if fresh else key_positions
        step = Step(
            positions,
            key_positions,
            tuple(rope_angles(rope, positions, lengths) for rope in self.runtime.ropes),
            None if cache is None else cache.length,
            fresh,
        )
        constrain = self.runtime.placement.constrain
        x = constrain(self.embed(tokens, positions), *RESIDUAL)
        held = None if cache is None else cache.layers
        if self.stacked:
            x, layer_caches = self._scan_layers(x, step, held)
        else:
            x, layer_caches = self._unroll_layers(x, step, held, last_only=last_only and seq > 1)
        if cache is not None:
            cache = replace(cache, layers=layer_caches, length=cache.length + seq)
        if last_only:
            x = x[:, -1:]
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.head(x, self.embed.embedding[...]), cache

    def _unroll_layers(
        self, x: jax.Array, step: Step, caches: tuple[LayerCache, ...] | None, *, last_only: bool
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        updated = []
        for index, layer in enumerate(self.layers):
            definition, state = nnx.split(layer)
            if last_only and index == len(self.layers) - 1:  # of what it computes, only the last token's is read
                step = replace(step, last_only=True)
            x, cache = _apply_layer(definition, state, x, step, caches[index] if caches else None)
            if cache is not None:
                updated.append(cache)
        return x, tuple(updated)

    def _scan_layers(
        self, x: jax.Array, step: Step, caches: tuple[LayerCache, ...] | None
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """One scan per group of repeated layers, its caches carried whole and written a row at a time."""
        updated: list[LayerCache] = []
        place = 0
        for group in self.spec.groups():
            places = range(place, place + len(group.unit))
            place += len(group.unit)
            split = [nnx.split(self.layers[i]) for i in places]
            held: tuple[LayerCache | None, ...]
            held = tuple(caches[i] for i in places) if caches else (None,) * len(group.unit)

            def body(carry: Any, inputs: Any, split: Any = split) -> tuple[Any, None]:
                x, held = carry
                turn, states = inputs
                after = []
                for (definition, _), state, cache in zip(split, states, held, strict=True):
                    x, cache = nnx.merge(definition, state)(x, step, cache, turn if cache is not None else None)
                    after.append(cache)
                return (x, tuple(after)), None

            states = tuple(state for _, state in split)
            (x, held), _ = jax.lax.scan(body, (x, held), (jnp.arange(group.repeats), states))
            updated.extend(cache for cache in held if cache is not None)
        return x, tuple(updated)


@partial(jax.jit, static_argnums=0)
def _apply_layer(
    definition: Any, state: Any, x: jax.Array, step: Step, cache: LayerCache | None
) -> tuple[jax.Array, LayerCache | None]:
    """One layer. Layers with equal definitions and shapes hit jit's cache and are traced once."""
    return nnx.merge(definition, state)(x, step, cache)


def _layer_paths(spec: ArchitectureSpec, *, stacked: bool) -> Iterator[tuple[str, Any]]:
    if not stacked:
        yield from ((f"layers.{index}", layer) for index, layer in enumerate(spec.layers))
        return
    for number, group in enumerate(spec.groups()):
        yield from ((f"groups.{number}.{place}", layer) for place, layer in enumerate(group.unit))
