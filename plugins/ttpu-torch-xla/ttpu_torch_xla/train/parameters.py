"""Which parameters of a stock model a run trains, and where it holds their optimizer state. Settings name parameters by
the paths of the architecture, as on every backend; a stock model has transformers' names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.strategy import MeshAxes
from ttpu_core.spec import axes
from ttpu_torch_xla.sharding.apply import parameter_partition_specs
from ttpu_torch_xla.sharding.axes import memory_names
from ttpu_torch_xla.sharding.fsdp import INNER

if TYPE_CHECKING:
    from ttpu_core.sharding.parallelism import Parallelism

Specs = Mapping[str, tuple[MeshAxes, ...]]


def named(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name → parameter, with the names of before the layers were wrapped; each shared one once."""
    return {name.replace(INNER, ""): one for name, one in model.named_parameters()}


def paths_of(model: Any, architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Parameter name → the paths of the architecture that it holds; several for fused projections and stacked experts.
    What the architecture does not describe (towers for images and sound) is not in it."""
    every = {name.replace(INNER, ""): one for name, one in model.named_parameters(remove_duplicate=False)}
    first = {id(one): name for name, one in reversed(every.items())}
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for rules in (architecture.mapping.rules, *architecture.mapping.alternatives):
        tensors: defaultdict[str, list[str]] = defaultdict(list)
        for path, rule in rules:
            for leaf in rule.leaves():
                tensors[leaf.name].append(path)
        held, _ = memory_names(model, tensors, every)
        for tensor, (name, _) in held.items():
            if name in every:
                found[first[id(every[name])]].update(dict.fromkeys(tensors[tensor]))
    return {name: tuple(paths) for name, paths in found.items()}


def trained_names(
    patterns: Iterable[str] | None, paths: Mapping[str, tuple[str, ...]], model_type: str
) -> tuple[str, ...]:
    """The names of the trained parameters.

    Args:
        patterns: fnmatch patterns of paths; None trains all.
        paths: of each parameter.
        model_type: of the model, for errors.

    Raises:
        RequestError: a pattern that matches nothing.
        UnsupportedError: patterns that choose some paths of one parameter.
    """
    if patterns is None:
        return tuple(paths)
    patterns, found = tuple(patterns), []
    for name, held in paths.items():
        chosen = [matches(path, patterns) for path in held]
        if any(chosen) and not all(chosen):
            missing = next(path for path, one in zip(held, chosen, strict=True) if not one)
            raise UnsupportedError(
                f"trainable={list(patterns)} chooses some of {name} and not {missing}, but transformers holds both in "
                "one tensor: use patterns that choose both, or backend='jax'."
            )
        if all(chosen):
            found.append(name)
    every = [path for held in paths.values() for path in held]
    for pattern in patterns:
        if not any(matches(path, (pattern,)) for path in every):
            raise RequestError(
                f"trainable={pattern!r} was asked for, but no parameter of this {model_type} model has such a path: "
                f"use patterns of paths such as {every[0]} and {every[-1]}."
            )
    return tuple(found)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns of fnmatch."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Placements:
    """How weights, gradients and optimizer state are sharded.

    Attributes:
        weights: the mesh axes that shard each dimension of each parameter; empty on one device.
        state: of its optimizer state.
        gradients: of its gradient.
    """

    weights: Specs
    state: Specs
    gradients: Specs


def batch_axes(parallelism: Parallelism | None) -> tuple[str, ...]:
    """The mesh axes of several devices that shard the rows of a batch."""
    if parallelism is None:
        return ()
    sizes = dict(parallelism.mesh)
    return tuple(axis for axis in dict(parallelism.strategy.rules).get(axes.BATCH, ()) if sizes.get(axis, 1) > 1)


def placements(
    model: Any, architecture: Architecture, parallelism: Parallelism | None, stage: int | None
) -> Placements:
    """The placements of a stage of ZeRO (arXiv 1910.02054). Weights lie as the mesh has sharded them when the model was
    loaded, which is stage 3 where the batch's axes shard them; else stages 1 and 2 shard state and gradients.

    Raises:
        RequestError: a stage above 0 without several devices along an axis of the batch.
        UnsupportedError: a stage that the mesh's weights contradict.
    """
    if parallelism is None:
        if stage:
            raise RequestError(
                f"zero_stage={stage} divides the optimizer's state over the devices that rows are divided over, but "
                "the model is on one device: load it with parallelism_strategy='fsdp', or use zero_stage=0."
            )
        return Placements({}, {}, {})
    found = {
        name.replace(INNER, ""): one
        for name, one in parameter_partition_specs(model, architecture, parallelism).items()
    }
    along, sizes = batch_axes(parallelism), dict(parallelism.mesh)
    sharded = any(axis in along for one in found.values() for dimension in one for axis in dimension)
    if stage is not None and sharded != (stage == 3):
        raise UnsupportedError(
            f"zero_stage={stage} was asked for on the mesh {parallelism}, but the torch_xla backend trains with the "
            f"weights where they were loaded, which is stage {'3 alone' if sharded else '0, 1 or 2'} there: use "
            f"a mesh with the axis {'data in place of fsdp and expert' if sharded else 'fsdp'}, leave "
            "zero_stage out, or use backend='jax'."
        )
    if stage and not along:
        raise RequestError(
            f"zero_stage={stage} divides the optimizer's state over the devices that rows are divided over, but every "
            f"device of the mesh {parallelism} computes all rows: use a mesh with the axis data, fsdp or expert, or "
            "zero_stage=0."
        )
    if stage not in (1, 2):
        return Placements(found, found, found)
    devices = prod(sizes[axis] for axis in along)
    parameters = named(model)
    state = {name: _divided(one, parameters[name].shape, along, devices) for name, one in found.items()
             if name in parameters}  # fmt: skip
    return Placements(found, state, state if stage == 2 else found)


def _divided(
    spec: tuple[MeshAxes, ...], shape: Iterable[int], along: tuple[str, ...], devices: int
) -> tuple[MeshAxes, ...]:
    """The sharding with the batch's axes on the first dimension that is whole and that they divide."""
    result = list(spec)
    for place, (by, size) in enumerate(zip(spec, shape, strict=True)):
        if not by and size % devices == 0:
            result[place] = along
            break
    return tuple(result)
