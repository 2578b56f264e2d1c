"""Sees a checkpoint that stores the experts of a layer as one tensor as a checkpoint that stores each by itself, which
is how quantized matrices are stored. Nothing is read: an expert is a part of the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint, TensorInfo
from ttpu_core.mapping import Expression, Stack, Tensor


@dataclass(frozen=True)
class SingleExperts(Checkpoint):
    """A checkpoint with other names for parts of its tensors.

    Attributes:
        found: every tensor by name.
    """

    found: Mapping[str, TensorInfo]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self.found


def with_single_experts(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint with a tensor for each expert, under the names by which the family's mapping reads such tensors;
    unchanged if it has them, or if an expert's weights are not side by side in the file."""
    mapping = architecture.mapping
    held = dict(mapping.suited_to(checkpoint.tensors).rules)
    for rules in (mapping.rules, *mapping.alternatives):
        other = {path: rule for path, rule in rules if held.get(path) != rule}
        parts = [(path, held[path], tuple(_parts(rule, 0))) for path, rule in other.items()]
        if parts and all(_is_whole(rule) and _covers(rule, found) for _, rule, found in parts):
            break
    else:
        return checkpoint
    stored = mapping.suited_to(checkpoint.tensors).canonical(checkpoint.tensors)
    tensors = dict(checkpoint.tensors)
    for _, rule, found in parts:
        (whole,) = rule.leaves()
        info = tensors.pop(stored[whole.name])
        width = info.nbytes // info.size
        for leaf, start in found:
            name = _as_stored(leaf.name, whole.name, info.name)
            size = prod(leaf.shape)
            place = info.start + start * width
            tensors[name] = replace(info, name=name, shape=leaf.shape, start=place, nbytes=size * width)
    return SingleExperts(checkpoint.path, checkpoint.config, checkpoint.source, MappingProxyType(tensors))


def _parts(rule: Expression, start: int) -> Iterator[tuple[Tensor, int]]:
    """The tensors that a rule stacks, and the number of the first element of each in what the rule gives; tensors that
    are not whole there have the number -1."""
    if isinstance(rule, Stack) and rule.axis == 0:
        size = prod(rule.parts[0].result_shape)
        for number, part in enumerate(rule.parts):
            yield from _parts(part, start + number * size if start >= 0 else -1)
        return
    for leaf in rule.leaves():
        yield leaf, start if _is_whole(rule) else -1


def _is_whole(rule: Expression) -> bool:
    """Whether a rule gives the elements of one tensor in the order in which they are stored."""
    return isinstance(rule, Tensor) and all(operation == "reshape" for operation, _ in rule.views)


def _covers(rule: Expression, found: tuple[tuple[Tensor, int], ...]) -> bool:
    """Whether matrices are all that a rule gives."""
    matrices = all(start >= 0 and len(leaf.shape) == 2 for leaf, start in found)
    return matrices and sum(prod(leaf.shape) for leaf, _ in found) == prod(rule.result_shape)


def _as_stored(name: str, other: str, stored: str) -> str:
    """A name as the checkpoint would have it, whose prefix differs from the mapping's as `stored` from `other`."""
    same = next((n for n, (a, b) in enumerate(zip(other[::-1], stored[::-1], strict=False)) if a != b), len(other))
    return stored[: len(stored) - same] + name.removeprefix(other[: len(other) - same])
