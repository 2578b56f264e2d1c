"""The equal layers of a prompt in a loop, so that one of them is compiled for all. The devices of a ring multiply by a
kernel several times in a layer, and unrolled layers find theirs in VMEM, where XLA:TPU has fetched them before. In a
loop it fetches nothing: here a kernel does, in the background (`ttpu_jax.ops.fetch`).

A turn also fetches the vectors of the next layer, such as the scales of norms, and sums the squares of the stream for
the next layer's first norm, so that XLA:TPU does this within the product before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ttpu_core.spec import ArchitectureSpec, AttentionSpec, axes
from ttpu_jax.model.attention import Attention
from ttpu_jax.model.layers import DecoderLayer, run_layer
from ttpu_jax.model.modules import MLP, Norm, Runtime, Step, ring_of, value_of
from ttpu_jax.model.step_cache import NoCache, TokenKeys
from ttpu_jax.ops.fetch import Choices, Copies, copies
from ttpu_jax.ops.norm import sum_of_squares
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.optimizations import Optimization

_CHIPS = ("v5e", "v6e")
_VMEM_BYTES = 84 << 20
"""Of the 128 MiB of VMEM of these chips, what may be taken on one device by a layer's kernels and by the product of its
attention, which has all rows before the devices add it up. With more, XLA:TPU keeps in HBM what it would keep in VMEM.
"""
_STACKED_BYTES = 128 << 20
"""What keys and values of all turns may take on one device, beside the cache, to which they are written behind the
loop."""
_LEAST_TURNS = 3
_FETCHED = ("attention", "mlp")
"""The parts of a layer whose kernels are fetched, in the order in which they are used."""

Path = tuple[Any, ...]


def layer_loops(
    spec: ArchitectureSpec, layers: Sequence[nnx.Module], x: jax.Array, runtime: Runtime, *, last_only: bool
) -> dict[int, LayerLoop]:
    """The loops over the layers of a prompt, by the number of their first layer.

    Layers of several kinds that alternate are in none: a loop over those of gemma-3-12b takes 6 % longer than they do
    unrolled.

    Args:
        spec: the architecture.
        layers: all of them.
        x: the stream [batch, seq, hidden] that goes into the first one.
        runtime: the placement of arrays.
        last_only: the last layer is wanted for the last token alone, and so is in no loop.
    """
    if Optimization.LAYER_LOOP in runtime.without or runtime.trains or not _on_a_ring(x, runtime):
        return {}
    found = {}
    for group in spec.groups():
        end = group.start + group.repeats
        alike = layers[group.start : end - (last_only and end == len(layers))]
        if len(group.unit) == 1 and len(alike) >= _LEAST_TURNS and _fits(alike[0], x):
            loop = LayerLoop(alike, runtime)
            in_vmem = loop.kernel_bytes + _bytes_of_rows(x, runtime)
            if in_vmem <= _VMEM_BYTES and loop.kept_bytes(x) <= _STACKED_BYTES:
                found[group.start] = loop
    return found


def _on_a_ring(x: jax.Array, runtime: Runtime) -> bool:
    """Whether the devices exchange the rows of x [batch, seq, hidden] in a ring, and have VMEM to fetch to. Devices
    that are no TPUs have none; where they are told to exchange rows, they run the loop too."""
    ring = ring_of(x, runtime)
    if ring is None or runtime.placement.platform != "tpu":
        return ring is not None
    return ring.chip is not None and ring.chip.name in _CHIPS


def _bytes_of_rows(x: jax.Array, runtime: Runtime) -> int:
    """Of all rows of x [batch, seq, hidden] that the devices of a ring have."""
    batch, seq, hidden = x.shape
    return runtime.placement.part(axes.BATCH, batch) * seq * hidden * x.dtype.itemsize


def _fits(layer: nnx.Module, x: jax.Array) -> bool:
    """Whether a layer reads nothing but the stream x [batch, seq, hidden], and all its products are on the ring."""
    if type(layer) is not DecoderLayer or not isinstance(layer.spec.mixer, AttentionSpec) or layer.beside is not None:
        return False
    block, attention, mlp = layer.spec.block, layer.attention, layer.mlp
    alone = not block.reads_embedding and block.shared is None and layer.spec.mixer.kv_from_layer is None
    if not alone or type(attention) is not Attention or type(mlp) is not MLP:
        return False
    return attention.ring(x) is not None and attention.output.is_plain and mlp.ring(x) is not None


class LayerLoop:
    """A loop over layers that are alike.

    Args:
        layers: one for each turn.
        runtime: the placement of arrays.
    """

    def __init__(self, layers: Sequence[Any], runtime: Runtime) -> None:
        self.runtime = runtime
        split = [nnx.split(layer) for layer in layers]
        self._definition = split[0][0]
        states = [dict(nnx.to_flat_state(state)) for _, state in split]
        self._variables = states[0]
        self._arrays = {path: tuple(value_of(state[path]) for state in states) for path in states[0]}
        kernels = [path for path in self._arrays if path[0] in _FETCHED and path[-1] == "kernel"]
        self._kernels = {name: tuple(path for path in kernels if path[0] == name) for name in _FETCHED}
        self._vectors = tuple(path for path, (first, *_) in self._arrays.items() if first.ndim == 1)
        self._others = tuple(path for path in self._arrays if path not in {*kernels, *self._vectors})
        self._mixer: AttentionSpec = layers[0].spec.mixer
        self.turns = len(layers)

    @property
    def kernel_bytes(self) -> int:
        """Of the kernels of one layer on one device."""
        mesh = self.runtime.placement.mesh
        assert isinstance(mesh, Mesh)
        paths = [path for of_part in self._kernels.values() for path in of_part]
        shards = {path: prod(mesh.shape[axis] for each in self._axes(path) for axis in each) for path in paths}
        return sum(self._arrays[path][0].nbytes // shards[path] for path in paths)

    def kept_bytes(self, x: jax.Array) -> int:
        """Of the keys and values of all layers for the stream x [batch, seq, hidden], on one device."""
        placement, mixer = self.runtime.placement, self._mixer
        rows = placement.part(axes.BATCH, x.shape[0]) * x.shape[1]
        heads = placement.part(axes.KV_HEADS, mixer.num_kv_heads)
        return self.turns * rows * heads * (mixer.head_dim + mixer.value_dim) * x.dtype.itemsize

    def __call__(self, x: jax.Array, step: Step) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """Run the layers on the stream x [batch, seq, hidden] of tokens that attend to one another alone: the same
        shape, and the keys and values of each layer, [batch, kv_heads, seq, head_dim] and [batch, kv_heads, seq,
        value_dim]."""
        # Such as biases of fused kernels. They are few, and of shapes that kernels would have to be told about.
        others = {path: jnp.stack(self._arrays[path]) for path in self._others}

        def turn(carry: Any, nothing: None) -> tuple[Any, Any]:
            number, x, total, vectors = carry
            begun = self._begin(number)
            begun, x = jax.lax.optimization_barrier((begun, x))  # before anything of the layer
            values = dict(zip(self._vectors, vectors, strict=True))
            for path, stack in others.items():
                values[path] = jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
            layer = self._layer(values, begun, total)
            x, *_, keys = run_layer(layer, x, step, NoCache(step.query_positions))
            assert isinstance(keys, TokenKeys)
            return (number + 1, x, _total(x), layer.mlp.others), (keys.key, keys.value)

        first = tuple(self._arrays[path][0] for path in self._vectors)
        carry = jnp.int32(0), x, _total(x), first
        (_, x, _, _), (keys, values) = jax.lax.scan(turn, carry, None, length=self.turns)
        return x, [(keys[number], values[number]) for number in range(self.turns)]

    def _begin(self, number: jax.Array) -> tuple[Copies, ...]:
        """Begin to copy the kernels of a turn's layer, those of each part, and behind the last the vectors of the next
        turn's."""
        mesh, platform = self.runtime.placement.mesh, self.runtime.placement.platform
        assert isinstance(mesh, Mesh)
        groups = [[self._choices(path) for path in paths] for paths in self._kernels.values()]
        of_turns = (self._choices(path) for path in self._vectors)
        groups[-1] += [replace(one, arrays=(*one.arrays[1:], one.arrays[-1])) for one in of_turns]
        return copies(number, groups, mesh, platform)

    def _layer(self, values: dict[Path, jax.Array], begun: tuple[Copies, ...], total: jax.Array) -> Any:
        """A layer that waits for its kernels where it uses them.

        Args:
            values: all but these, by path.
            begun: the copies of the kernels.
            total: the sum of squares of its input.
        """
        given = {path: values.get(path, each[0]) for path, each in self._arrays.items()}
        state = {path: variable.replace(given[path]) for path, variable in self._variables.items()}
        layer = nnx.merge(self._definition, nnx.from_flat_state(state))
        for (name, paths), under_way in zip(self._kernels.items(), begun, strict=True):
            kernels = tuple(_at(layer, path) for path in paths)
            setattr(layer, name, _WhenFetched(getattr(layer, name), kernels, under_way))
        norm = layer.input_norm
        if norm is not None and norm.spec.kind == "rms":
            layer.input_norm = _Summed(norm, total)
        return layer

    def _axes(self, path: Path) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that shard each dimension of a parameter."""
        placement, shape = self.runtime.placement, self._arrays[path][0].shape
        logical = placement.divisible(self._variables[path].axis_names[-len(shape) :], shape)
        return placement.array_axes(logical, shape, "a parameter")

    def _choices(self, path: Path) -> Choices:
        return Choices(self._arrays[path], PartitionSpec(*(each or None for each in self._axes(path))))


def _at(layer: Any, path: Path) -> nnx.Variable:
    for name in path:
        layer = getattr(layer, name)
    found: nnx.Variable = layer
    return found


@part(Part.NORM)
def _total(x: jax.Array) -> jax.Array:
    return sum_of_squares(x)


@dataclass
class _WhenFetched:
    """A part of a layer, which waits for its kernels when it is called.

    Attributes:
        part: the attention or the MLP.
        kernels: its variables.
        copies: of their values, and of others behind them.
        others: these, after the call.
    """

    part: Any
    kernels: tuple[nnx.Variable, ...]
    copies: Copies
    others: tuple[jax.Array, ...] = ()

    def __call__(self, x: jax.Array, *rest: Any) -> Any:
        arrived = self.copies.after(x)
        for variable, array in zip(self.kernels, arrived, strict=False):
            variable.set_value(array)
        self.others = arrived[len(self.kernels) :]
        return self.part(x, *rest)


@dataclass(frozen=True)
class _Summed:
    """A norm of features whose squares are summed already."""

    norm: Norm
    total: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x, self.total)
