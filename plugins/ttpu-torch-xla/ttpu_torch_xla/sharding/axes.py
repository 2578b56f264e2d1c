"""Finds the logical axes of every parameter of a stock model. The architecture's mapping says how each of our
parameters is made of checkpoint tensors, which gives the axes of the torch parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.mapping import Expression, Padded, Stack, Tensor
from ttpu_core.spec import axes

Axis = tuple[str, int]
"""A logical axis, and how many there are of it: what shards it must divide that number."""

Dimension = tuple[Axis, ...]
"""The logical axes that one dimension of a tensor merges, the slowest-varying first. Sharded along the first of
them, a device holds whole heads, experts, ...; along a later one the result is the same, for more communication."""

Dimensions = tuple[Dimension, ...]
Logical = tuple[str | None, ...]

HELD = "_quantized"
"""Behind the name of a projection of experts, that of the module which holds it quantized."""


@dataclass(frozen=True)
class _Source:
    """A checkpoint tensor on its way into the model's memory."""

    pattern: str | None  # of the conversion that takes it, where one does
    dimensions: Dimensions


def parameter_axes(architecture: Architecture, model: Any) -> dict[str, Dimensions]:
    """Parameter name → logical axes of each dimension, for the parameters that the architecture describes.

    transformers holds some tensors under other names than checkpoints have, and the experts of a layer as one tensor:
    its own conversion of names and tensors is followed. A quantized layer, or projection of experts, says in
    `dimensions` what its buffers run along ("expert", "in" or "out"), and they are in the result under their own names.
    What is not described (towers for images and sound) is not in it.
    """
    parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    quantized = _quantized(model)
    ranks = {name: one.ndim for name, one in parameters.items()}
    for path, runs in quantized.items():
        ranks |= {path.removesuffix(HELD): 3} if is_stack(runs) else {f"{path}.weight": 2, f"{path}.bias": 1}
    found: dict[str, Dimensions] = {}
    for rules in (architecture.mapping.rules, *architecture.mapping.alternatives):
        on_disk = tensor_axes(rules, {path: one.axes for path, one in architecture.spec.parameters.items()})
        for name, dimensions in _in_memory(model, on_disk, ranks).items():
            if name not in found and ranks.get(name) == len(dimensions):
                found[name] = dimensions
    by_identity = {id(parameters[name]): dimensions for name, dimensions in found.items() if name in parameters}
    result = {
        name: _dividing(by_identity[id(one)], one.shape) for name, one in parameters.items() if id(one) in by_identity
    }
    for path, runs in quantized.items():
        weight = found.get(path.removesuffix(HELD) if is_stack(runs) else f"{path}.weight")
        if weight is not None:
            along = {"expert": weight[0], "out": weight[-2], "in": weight[-1]}
            result |= {f"{path}.{name}": tuple(along.get(run or "", ()) for run in each) for name, each in runs.items()}
    return result


def _dividing(dimensions: Dimensions, shape: Sequence[int]) -> Dimensions:
    """The axes of each dimension, with counts that divide it: transformers may hold more than checkpoints do, such as
    kernels of experts that return their input."""
    return tuple(
        tuple((name, gcd(count, size)) for name, count in merged)
        for merged, size in zip(dimensions, shape, strict=True)
    )


def _quantized(model: Any) -> dict[str, Mapping[str, Logical]]:
    """The modules that hold a weight in other tensors, and what the dimensions of those run along."""
    found = ((path, getattr(module, "dimensions", None)) for path, module in model.named_modules())
    return {path: runs for path, runs in found if isinstance(runs, Mapping)}


def is_stack(runs: Mapping[str, Logical]) -> bool:
    """Whether a module with these `dimensions` holds the weights of experts."""
    return any("expert" in dimensions for dimensions in runs.values())


def tensor_axes(rules: Iterable[tuple[str, Expression]], table: Mapping[str, Logical]) -> dict[str, Dimensions]:
    """Checkpoint tensor → logical axes of each dimension, by following each of a parameter's axes (`table`, by path)
    back through the rule that makes the parameter."""
    leaves: defaultdict[str, list[Dimensions]] = defaultdict(list)
    for path, rule in rules:
        for leaf, logical in _leaves(rule, table[path]):
            leaves[leaf.name].append(_dimensions(leaf, logical))
    return {name: _common(found) for name, found in leaves.items()}


def _leaves(rule: Expression, logical: Logical) -> Iterator[tuple[Tensor, Logical]]:
    """The checkpoint tensors of a rule, with the logical axes of each one's part."""
    if isinstance(rule, Tensor):
        yield rule, logical
    elif isinstance(rule, Padded):
        yield from _leaves(rule.part, logical)
    else:
        inner = logical[: rule.axis] + logical[rule.axis + 1 :] if isinstance(rule, Stack) else logical
        for part in rule.parts:
            yield from _leaves(part, inner)


def _dimensions(leaf: Tensor, logical: Logical) -> Dimensions:
    """The logical axes within each dimension of the tensor on disk: an axis lies in the dimension whose stride is the
    last not to exceed its own."""
    layout = leaf.layout
    strides = [1] * len(leaf.shape)
    for dim in range(len(leaf.shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * leaf.shape[dim]
    merged: list[list[tuple[int, int, Axis]]] = [[] for _ in leaf.shape]
    after: int | None = None
    for place in range(len(logical) - 1, -1, -1):
        size, stride, name = layout.shape[place], abs(layout.strides[place]), logical[place]
        dim = next((d for d, step in enumerate(strides) if step <= stride), len(strides) - 1)
        if size == 1 and after is not None and leaf.shape[dim] > 1:
            dim = after  # never stepped along, so that its stride says nothing: it lies with what follows it
        after = dim
        if name is not None:
            merged[dim].append((-stride, place, (name, size)))
    return tuple(tuple(axis for _, _, axis in sorted(found)) for found in merged)


def _common(found: list[Dimensions]) -> Dimensions:
    """What parts of one tensor, or tensors joined into one, have in common: the axes that all of them have, with what
    divides the numbers of all."""
    first, *others = found
    result: list[Dimension] = []
    for dim, merged in enumerate(first):
        counts = dict(merged)
        for other in others:
            there = dict(other[dim])
            counts = {name: gcd(count, there[name]) for name, count in counts.items() if name in there}
        result.append(tuple((name, counts[name]) for name, _ in merged if name in counts))
    return tuple(result)


def memory_names(
    model: Any, on_disk: Iterable[str], names: Collection[str]
) -> tuple[dict[str, tuple[str, str | None]], list[Any]]:
    """The names by which a model holds the tensors of a checkpoint, as transformers loads them.

    Args:
        model: the stock model.
        on_disk: names of the checkpoint's tensors.
        names: those of the model's parameters.

    Returns:
        Checkpoint name → the model's name and the pattern of the conversion that takes the tensor, None where none
        does; and the conversions.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    steps: list[Any] = get_model_conversion_mapping(model)
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if not isinstance(step, WeightConverter)]
    present = dict.fromkeys(names, True)
    found: dict[str, tuple[str, str | None]] = {}
    for name in on_disk:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, present)
        if name in names and renamed not in names:
            renamed, pattern = name, None  # a model that holds it under the checkpoint's name already
        found[name] = renamed, pattern
    return found, converters


def _in_memory(model: Any, on_disk: Mapping[str, Dimensions], names: Mapping[str, int]) -> dict[str, Dimensions]:
    """From the tensors of a checkpoint to the model's parameters, as transformers loads them."""
    held, converters = memory_names(model, on_disk, names)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    sources: defaultdict[str, list[_Source]] = defaultdict(list)
    result: dict[str, Dimensions] = {}
    for name, (renamed, pattern) in held.items():
        sources[renamed].append(_Source(pattern, on_disk[name]))
    for name, parts in sources.items():
        if parts[0].pattern is None:
            result[name] = _common([part.dimensions for part in parts])
        else:
            result |= _converted(name, parts, by_pattern[parts[0].pattern])
    return result


def _converted(name: str, parts: list[_Source], converter: Any) -> dict[str, Dimensions]:
    """What a conversion of transformers makes of checkpoint tensors; nothing where it does what is not known here."""
    groups: defaultdict[str | None, list[Dimensions]] = defaultdict(list)
    for part in parts:
        groups[part.pattern].append(part.dimensions)
    merged = {pattern: _common(found) for pattern, found in groups.items()}
    counts = {pattern: len(found) for pattern, found in groups.items()}
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            merged = {
                pattern: (*one[: operation.dim], ((axes.EXPERT, counts[pattern]),), *one[operation.dim :])
                for pattern, one in merged.items()
            }
        elif kind == "Concatenate":
            merged = {None: _common(list(merged.values()))}
        elif kind == "Transpose" and not operation.check_dims:
            merged = {pattern: _swapped(one, operation.dim0, operation.dim1) for pattern, one in merged.items()}
        else:
            return {}
    return {name: _common(list(merged.values()))}


def _swapped(dimensions: Dimensions, first: int, second: int) -> Dimensions:
    order = list(dimensions)
    order[first], order[second] = order[second], order[first]
    return tuple(order)
