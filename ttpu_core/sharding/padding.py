"""Padding of an architecture for a mesh that does not divide its sizes, so that tensor parallelism accepts any head
count. `pad_architecture` returns the padded architecture and the padding of each parameter. Results equal those
of one device: added entries are multiplied by zeros, and each copy of a KV head serves a part of its queries.

Some sizes cannot be padded with equal results: norms over an MLP's inner features or over the outputs of all heads,
activations that look at all features (sparsity), ALiBi, experts, the residual stream, and parts that a plugin
describes itself. They keep their size, and `Strategy.mesh_axes` refuses them with the counts that divide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import lcm, prod
from types import MappingProxyType

from ttpu_core.mapping.padding import Padding
from ttpu_core.sharding.heads import HeadSplit, head_splits
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerSpec, MLPSpec, MoESpec, Parameter, axes
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.parameters import layer_parameters, layer_paths, stacked_paths
from ttpu_core.spec.short_convolution import ShortConvolutionSpec

__all__ = ["Padding", "Paddings", "pad_architecture", "stacked_paddings"]

Paddings = Mapping[str, Padding]
Devices = Callable[[str], int]  # logical axis → how many devices share it


def pad_architecture(
    spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy = DEFAULT_STRATEGY
) -> tuple[ArchitectureSpec, Paddings]:
    """The architecture padded for a mesh, and Flax path → padding of each parameter whose shape changes.

    KV heads are repeated, each copy with its share of the queries, or KV heads of zeros are added: whichever needs
    the fewest head-sized slots. On 8 devices, 28 query and 4 KV heads become 32 and 8; on 32 devices, 32 and 32.
    Sizes that divide already stay unchanged, so padding twice changes nothing.

    Args:
        spec: the architecture.
        mesh: mesh axis → number of devices along it.
        strategy: which mesh axes shard heads, MLPs and the vocabulary.
    """
    return _padded(spec, tuple(sorted((axis, size) for axis, size in mesh.items() if size > 1)), strategy)


def stacked_paddings(padded: ArchitectureSpec, paddings: Paddings) -> dict[str, tuple[Padding | None, ...]]:
    """The paddings for a decoder that scans over layers (`ttpu_core.spec.parameters.stacked_parameters`): path → the
    padding of each copy along the leading axis. Parameters that are not stacked are omitted."""
    found = ((path, tuple(map(paddings.get, copies))) for path, copies in stacked_paths(padded, padded.parameters))
    return {path: copies for path, copies in found if any(copies)}


@lru_cache(maxsize=256)
def _padded(
    spec: ArchitectureSpec, mesh: tuple[tuple[str, int], ...], strategy: Strategy
) -> tuple[ArchitectureSpec, Paddings]:
    table, sizes = dict(strategy.rules), dict(mesh)

    def devices(axis: str) -> int:
        return prod(sizes.get(mesh_axis, 1) for mesh_axis in table.get(axis, ()))

    of_table = 1 if spec.head.tied else devices(axes.LOOKED_UP)
    rows = _multiple(spec.embedding.rows, lcm(devices(axes.VOCAB), of_table))
    splits = head_splits(spec, devices(axes.KV_HEADS))
    known: dict[tuple[LayerSpec, HeadSplit | None], tuple[LayerSpec, dict[str, Padding]]] = {}
    layers: list[LayerSpec] = []
    paddings: dict[str, Padding] = {}
    for index, layer in enumerate(spec.layers):
        key = layer, splits.get(index)
        if key not in known:
            known[key] = _layer(*key, devices, spec.hidden_size)
        padded, of_layer = known[key]
        layers.append(padded)
        paths = layer_paths(layer, index, spec.hidden_size) if of_layer else {}
        paddings |= {paths[path]: padding for path, padding in of_layer.items()}
    if rows == spec.embedding.rows and not paddings:
        return spec, MappingProxyType({})
    embedding = spec.embedding if rows == spec.embedding.rows else replace(spec.embedding, table_rows=rows)
    result = replace(spec, embedding=embedding, layers=tuple(layers))
    for path in ("embed.embedding", "head.kernel", "head.bias"):
        before, after = spec.parameters.get(path), result.parameters.get(path)
        if before and after and before.shape != after.shape:
            paddings[path] = _grown(before, after)
    return result, MappingProxyType(paddings)


def _layer(
    layer: LayerSpec, split: HeadSplit | None, devices: Devices, hidden: int
) -> tuple[LayerSpec, dict[str, Padding]]:
    """The padded layer, and path within it → padding."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        mixer = mixer if split is None else split.apply(mixer)
    elif isinstance(mixer, LatentAttentionSpec) and not mixer.implementations:
        mixer = mixer.with_heads(_multiple(mixer.num_heads, devices(axes.Q_HEADS)))
    elif isinstance(mixer, ShortConvolutionSpec) and not mixer.implementations:
        mixer = mixer.with_channels(_multiple(mixer.option("channels"), devices(axes.MLP)))
    if isinstance(mlp, MLPSpec):
        mlp = _mlp(mlp, devices(axes.MLP))
    elif mlp is not None:
        mlp = _moe(mlp, devices(axes.MLP))
    padded = replace(layer, mixer=mixer, mlp=mlp)
    before, after = layer_parameters(layer, hidden), layer_parameters(padded, hidden)
    changed = {path: (before[path], after[path]) for path in before if before[path].shape != after[path].shape}
    return padded, {path: _padding(path, layer, split, *both) for path, both in changed.items()}


def _padding(path: str, layer: LayerSpec, split: HeadSplit | None, before: Parameter, after: Parameter) -> Padding:
    if isinstance(layer.mixer, AttentionSpec) and split is not None and path.startswith("attention."):
        return split.padding(path, layer.mixer, before, after)
    if isinstance(layer.mixer, LatentAttentionSpec) and path == "mixer.output.kernel":
        hidden, features = before.shape
        heads = layer.mixer.num_heads
        added = after.shape[1] * heads // features - heads
        return Padding(before.shape, after.shape, (hidden, heads, features // heads), 1, ((0, heads), (-1, added)))
    return _grown(before, after)


def _grown(before: Parameter, after: Parameter) -> Padding:
    """Zeros after the end of the one dimension that differs."""
    (axis,) = (a for a, sizes in enumerate(zip(before.shape, after.shape, strict=True)) if len(set(sizes)) > 1)
    size = before.shape[axis]
    return Padding(before.shape, after.shape, before.shape, axis, ((0, size), (-1, after.shape[axis] - size)))


def _mlp(spec: MLPSpec, devices: int) -> MLPSpec:
    if spec.sparsity or (spec.inner_norm is not None and spec.inner_norm.kind != "none"):
        return spec
    return replace(spec, intermediate_size=_multiple(spec.intermediate_size, devices))


def _moe(spec: MoESpec, devices: int) -> MoESpec:
    return replace(
        spec,
        intermediate_size=_multiple(spec.intermediate_size, devices),
        shared=None if spec.shared is None else _mlp(spec.shared, devices),
        dense=None if spec.dense is None else _mlp(spec.dense, devices),
    )


def _multiple(size: int, devices: int) -> int:
    return -(-size // devices) * devices
