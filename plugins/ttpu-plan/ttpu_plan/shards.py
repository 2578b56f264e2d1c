"""The shards of a model on one device. It takes an architecture, a mesh and a strategy, and returns, for each kind of
layer and both ends of the model, the shape of every parameter on one device, as stored and as multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.grouping import fit_formats
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ArchitectureSpec, LayerSpec, Parameter, axes
from ttpu_core.spec.kernel_format import parts_of
from ttpu_core.spec.parameters import LAYERS, SHARED, layer_paths

Shape = tuple[int, ...]
MeshItems = tuple[tuple[str, int], ...]
EXPERTS = ".experts."
"""In the path of a parameter of experts."""
_STAY = (axes.EXPERT, axes.MLP)
"""Dimensions of experts for which devices gather tokens, and not experts."""
_PADDED = (axes.VOCAB, axes.LOOKED_UP, axes.KV_HEADS, axes.Q_HEADS, axes.MLP)


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """One parameter on one device."""

    path: str  # within its layer, or within the model
    parameter: Parameter
    local: Shape  # what a device holds
    gathered: Shape  # what it multiplies with: whole along the mesh axes that shard its tokens too, but for experts
    mesh_axes: tuple[tuple[str, ...], ...]  # which shard each dimension at rest
    multiplied_axes: tuple[tuple[str, ...], ...]  # which shard each dimension where it is multiplied
    parts: tuple[ParameterShard, ...] = ()  # the arrays of a quantized kernel

    @property
    def is_matrix(self) -> bool:
        """Whether every token is multiplied by it, so that it may be quantized: a kernel, not an embedding table."""
        return self.path.endswith("kernel")

    @property
    def of_experts(self) -> bool:
        """Whether a token is multiplied only by the parts of some experts."""
        return EXPERTS in self.path


@dataclass(frozen=True, slots=True)
class LayerShards:
    """A kind of layer, and the number of layers of that kind."""

    layer: LayerSpec
    count: int
    parameters: tuple[ParameterShard, ...]
    shared: tuple[ParameterShard, ...] = ()  # that other layers use too

    @property
    def used(self) -> tuple[ParameterShard, ...]:
        """All parameters that a layer computes with."""
        return (*self.shared, *self.parameters)


@dataclass(frozen=True)
class ModelShards:
    """A model on one device of a mesh, padded for the mesh (see `ttpu_core.sharding.padding`)."""

    spec: ArchitectureSpec
    mesh: Mapping[str, int]
    strategy: Strategy
    ends: tuple[ParameterShard, ...]  # embedding, final norm and head
    layers: tuple[LayerShards, ...]
    shared: tuple[ParameterShard, ...] = ()  # blocks that several layers use

    def devices(self, axis: str, size: int) -> int:
        """Return how many devices share a dimension of an activation: the product of its mesh axes, or 1 where they do
        not divide it."""
        return _devices(self.strategy, tuple(self.mesh.items()), axis, size)

    def axes_of(self, axis: str, size: int) -> tuple[str, ...]:
        """Return the mesh axes that shard a dimension of an activation."""
        if self.devices(axis, size) == 1:
            return ()
        return tuple(a for a in dict(self.strategy.rules).get(axis, ()) if self.mesh.get(a, 1) > 1)

    def local_shape(self, logical: tuple[str | None, ...], shape: Shape) -> Shape:
        """Return the shape of an activation or cache on one device; a dimension that the mesh does not divide is whole
        there."""
        sizes = zip(logical, shape, strict=True)
        kept = tuple(axis if self.devices(axis or "", size) > 1 else None for axis, size in sizes)
        return _local_shape(self.strategy.mesh_axes(kept, shape, self.mesh, "an activation"), shape, self.mesh)

    def end(self, path: str) -> ParameterShard | None:
        """Return the parameter of this path outside the layers (embedding, final norm, head), or None."""
        return next((one for one in self.ends if one.path == path), None)

    @property
    def head(self) -> ParameterShard:
        """The table of the head: the embedding's where they are tied."""
        found = self.end("head.kernel") or self.end("embed.embedding")
        assert found is not None
        return found


def shard_model(
    spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy = DEFAULT_STRATEGY
) -> ModelShards:
    """Return the shards of a model on one device of a mesh.

    Raises:
        UnsupportedError: a parameter that the mesh cannot divide, even padded.
    """
    return _shard_model(spec, tuple((axis, size) for axis, size in mesh.items() if size > 1), strategy)


def admissible(spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy = DEFAULT_STRATEGY) -> bool:
    """Whether the model can be sharded this way."""
    try:
        shard_model(spec, mesh, strategy)
    except UnsupportedError:
        return False
    return True


@lru_cache(maxsize=8192)
def tiled_bytes(shape: Shape, bits: float) -> int:
    """Bytes of an array on a TPU, where the two minor dimensions come in tiles of 8 × 128.

    The compiler chooses the order of dimensions that wastes least, and takes tiles of 4, 2 or 1 rows (at least one
    32-bit word deep) for fewer; read off the layouts of libtpu 0.0.42: bfloat16 [32, 8, 2048, 64] takes no padding,
    [1, 4096] takes twice its size, [4096] none.
    """
    if len(shape) < 2:
        return int(_up(prod(shape), 128) * bits / 8)
    least = max(1, round(32 / max(bits, 4)))
    total, sizes = prod(shape), sorted(set(shape))
    padded = []
    for minor in sizes:
        for second in sizes if sum(size == minor for size in shape) > 1 else (s for s in sizes if s != minor):
            rows = min(8, max(least, 1 << (second - 1).bit_length()))
            padded.append(total // minor // second * _up(minor, 128) * _up(second, rows))
    return int(min(padded) * bits / 8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _local_shape(mesh_axes: tuple[tuple[str, ...], ...], shape: Shape, mesh: Mapping[str, int]) -> Shape:
    return tuple(size // prod(mesh[a] for a in by) for size, by in zip(shape, mesh_axes, strict=True))


@lru_cache(maxsize=4096)
def _devices(strategy: Strategy, mesh: MeshItems, axis: str, size: int) -> int:
    sizes = dict(mesh)
    devices = prod(sizes.get(a, 1) for a in dict(strategy.rules).get(axis, ()))
    return devices if size % devices == 0 else 1


@lru_cache(maxsize=2048)
def _shard_model(spec: ArchitectureSpec, mesh: MeshItems, strategy: Strategy) -> ModelShards:
    sizes, rules = dict(mesh), dict(strategy.rules)
    # Padding depends on these axes alone, so that few different padded models are made.
    padding = {a for axis in _PADDED for a in rules.get(axis, ())}
    padded, paddings = pad_architecture(spec, {axis: size for axis, size in mesh if axis in padding}, strategy)
    padded, _ = fit_formats(padded, spec, paddings, sizes, strategy)
    of_tokens = {a for axis in (axes.BATCH, axes.SEQUENCE) for a in rules.get(axis, ())}
    stay = {axis: rules.get(axis, ()) for axis in _STAY}

    def shards(named: Mapping[str, Parameter]) -> Iterator[ParameterShard]:
        for path, parameter in named.items():
            of_kernel = {} if parameter.format is None else dict(parts_of(parameter))
            parts = tuple(shards({f"{path}.{name}": part for name, part in of_kernel.items()}))
            mesh_axes = strategy.mesh_axes(parameter.axes, parameter.shape, sizes, path)
            kept = tuple(
                tuple(a for a in by if a not in of_tokens or (EXPERTS in path and a in stay.get(axis or "", ())))
                for axis, by in zip(parameter.axes, mesh_axes, strict=True)
            )
            local, gathered = (_local_shape(by, parameter.shape, sizes) for by in (mesh_axes, kept))
            yield ParameterShard(path, parameter, local, gathered, mesh_axes, kept, parts)

    ends, shared, kinds = _kinds(padded)
    layers = (LayerShards(one.layer, one.count, tuple(shards(one.own)), tuple(shards(one.shared))) for one in kinds)
    return ModelShards(padded, sizes, strategy, tuple(shards(ends)), tuple(layers), tuple(shards(shared)))


@dataclass
class _Kind:
    """Layers that are alike: one of them, how many there are, and their parameters by path within the layer."""

    layer: LayerSpec
    count: int
    own: Mapping[str, Parameter]
    shared: Mapping[str, Parameter]


@lru_cache(maxsize=256)
def _kinds(spec: ArchitectureSpec) -> tuple[Mapping[str, Parameter], Mapping[str, Parameter], tuple[_Kind, ...]]:
    """The parameters of the model's ends, those of shared blocks, and different layers."""
    others = {path: one for path, one in spec.parameters.items() if not path.startswith(LAYERS)}
    shared = {path: one for path, one in others.items() if path.startswith(SHARED)}
    found: dict[tuple[LayerSpec, tuple[tuple[str, Parameter], ...]], _Kind] = {}
    for index, layer in enumerate(spec.layers):
        paths = layer_paths(layer, index, spec.hidden_size)
        of_block = {name: shared[path] for name, path in paths.items() if path in shared}
        own = {name: spec.parameters[path] for name, path in paths.items() if path not in shared}
        found.setdefault((layer, tuple(own.items())), _Kind(layer, 0, own, of_block)).count += 1
    return {path: one for path, one in others.items() if path not in shared}, shared, tuple(found.values())
