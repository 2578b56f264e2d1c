"""The kernels that low-rank adapters reach, and how the matrices of one make a kernel's: for the engine, which serves
adapters, and for the trainer.

A kernel made of several checkpoint tensors (queries, keys and values) has a block of ranks for each of them. The rule
that makes the kernel acts on outputs alone, so the same rule makes the block-diagonal `b` of the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ttpu_core.mapping import Concat, Expression, Padded, Stack, Tensor, gather
from ttpu_core.mapping.padding import Padding

_REACHED = re.compile(
    r"layers\.\d+\.(attention\.(qkv|value|gate|output)|(mlp|moe\.shared|moe\.dense)\.(gate_up|up|down))\.kernel"
)
_TURNED = (("transpose", (1, 0)),)


class Factors(Protocol):
    """The low-rank update b @ a of a module: a [rank, in], b [out, rank]."""

    @property
    def a(self) -> np.ndarray:
        """[rank, in]."""
        ...

    @property
    def b(self) -> np.ndarray:
        """[out, rank]."""
        ...

    @property
    def rank(self) -> int:
        """The rank."""
        ...


@dataclass(frozen=True)
class Site:
    """A kernel that adapters reach: `tensors` are the checkpoint's that it is made of, `rule` makes [*out, ranks of all
    blocks] of their `b`, `padding` is that of the inputs of `a` [ranks of all blocks, in]."""

    path: str
    tensors: tuple[str, ...]
    rule: Expression
    padding: Padding | None

    def matrices(self, updates: Mapping[str, Factors], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """`a` [blocks * rank, in] and `b` [*out, blocks * rank] of one adapter; zeros where it has nothing."""
        shapes = {leaf.name: leaf.shape for leaf in self.rule.leaves()}
        ranks = rank * len(self.tensors)
        given = [update for name in self.tensors if (update := updates.get(name)) is not None]
        a = np.zeros((ranks, given[0].a.shape[1]), np.float32)
        blocks = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        for number, name in enumerate(self.tensors):
            if (update := updates.get(name)) is not None:
                own = slice(number * rank, number * rank + update.rank)
                a[own], blocks[name][:, own] = update.a, update.b
        b = np.empty(self.rule.result_shape, np.float32)
        gather(self.rule, blocks.__getitem__, b)
        return (a if self.padding is None else self.padding.pad(a)), b


def is_reached(path: str) -> bool:
    """Whether adapters reach the kernels of such a Flax path."""
    return _REACHED.fullmatch(path) is not None


def reached_tensors(path: str, rule: Expression) -> tuple[str, ...] | None:
    """Return the checkpoint tensors of a kernel that adapters reach, by its Flax path; None for other parameters."""
    if _REACHED.fullmatch(path) is None or _narrowed(rule, 1) is None:
        return None
    return tuple(dict.fromkeys(leaf.name for leaf in rule.leaves()))


def make_site(path: str, tensors: tuple[str, ...], rule: Expression, ranks: int, padding: Padding | None) -> Site:
    """Make the site of a kernel.

    Args:
        path: the kernel's Flax path.
        tensors: the checkpoint tensors that the kernel is made of.
        rule: makes the kernel of the checkpoint tensors.
        ranks: the ranks of all `tensors` together.
        padding: the padding of the kernel; None where it has none.
    """
    narrowed = _narrowed(rule, ranks)
    assert narrowed is not None
    inputs = None
    if padding is not None:
        if padding.shape[-1] == padding.original[-1]:
            narrowed = Padded(narrowed, _with(padding, slice(-1, None), ranks))
        else:
            inputs = _with(padding, slice(0, 1), ranks)
    return Site(path, tensors, narrowed, inputs)


def _with(padding: Padding, where: slice, size: int) -> Padding:
    """The padding with the first or the last dimension, which it leaves alone, of another size."""

    def changed(shape: tuple[int, ...]) -> tuple[int, ...]:
        dims = list(shape)
        dims[where] = [size]
        return tuple(dims)

    return replace(
        padding, original=changed(padding.original), shape=changed(padding.shape), view=changed(padding.view)
    )


def is_transposed(tensor: Tensor) -> bool:
    """Whether a checkpoint holds the matrix as [in, out] and the rule turns it first, as that of gpt2's Conv1D."""
    return len(tensor.shape) == 2 and tensor.views[:1] == _TURNED


def module_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape [out, in] of the module that a matrix in a checkpoint is of; of other tensors their own."""
    return tensor.shape[::-1] if is_transposed(tensor) else tensor.shape


def _narrowed(rule: Expression, ranks: int) -> Expression | None:
    """The rule for tensors [out, ranks] in place of [out, in], or of [in, out] that is turned first; None where it does
    not leave inputs whole and last."""
    if isinstance(rule, Concat | Stack):
        if rule.axis == len(rule.result_shape) - 1:
            return None
        parts = [part for each in rule.parts if (part := _narrowed(each, ranks)) is not None]
        return replace(rule, parts=tuple(parts)) if len(parts) == len(rule.parts) else None
    if not isinstance(rule, Tensor) or len(rule.shape) != 2:
        return None
    outputs, inputs = module_shape(rule)
    result = Tensor(rule.name, (outputs, ranks))
    for operation, argument in rule.views[is_transposed(rule) :]:
        rank = len(result.result_shape)
        if operation == "reshape" and argument[-1] == inputs:
            result = result.reshape(*argument[:-1], ranks)
        elif operation == "transpose" and argument[-1] == rank - 1:
            result = result.transpose(*argument)
        elif operation == "take" and len(argument) < rank:
            result = result[tuple(part if isinstance(part, int) else slice(*part) for part in argument)]
        else:
            return None
    return result
