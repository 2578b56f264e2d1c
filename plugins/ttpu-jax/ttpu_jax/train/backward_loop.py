"""The loop over layers of a backward pass, with fewer writes and less memory than `jax.lax.scan` gives it.

JAX begins the loop with zeros for the gradients of all layers, which the loop then overwrites. XLA leaves such zeros
out where a loop counts up. A backward loop counts down, so they are written: 1.6 GiB in each step of Llama-3.1-8B on
eight devices. Here that memory is left unset. Only gradients in `unset` begin so: XLA may choose the order of
dimensions of zeros, but not that of unset memory.

A kernel's gradients are also written over activations that the forward pass kept, where they fit: each layer's over
those that the layer has read, so that they need no memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core.primitives import closed_call_p, scan_p
from jax.sharding import NamedSharding

from ttpu_core.sharding.training_state import fits_over


@dataclass(frozen=True, eq=False)
class LayerGradients:
    """Computes gradients as `function` does, in loops over layers that this module describes.

    Attributes:
        function: arguments → (path → gradient, anything else), as `jax.grad(..., has_aux=True)` returns it.
        unset: the paths of gradients [layers, ...] that begin with unset memory; others begin with zeros.
        by_rows: of these, the paths of gradients [layers, features, width] whose features are sharded over the same
            mesh axes as the rows of a batch, in the same order.
        devices: that rows lie over, each with an equal part of them.
    """

    function: Callable[..., tuple[Mapping[str, jax.Array], Any]]
    unset: Collection[str]
    by_rows: Collection[str]
    devices: int

    def __call__(self, *arguments: Any) -> tuple[dict[str, jax.Array], Any]:
        """The gradients, and what `function` returns beside them."""
        traced, shapes = jax.make_jaxpr(self.function, return_shape=True)(*arguments)
        paths = [path[1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes) if path[0].idx == 0]
        outvars = zip(paths, traced.jaxpr.outvars, strict=False)
        results = {path: variable for path, variable in outvars if isinstance(variable, jex.Var)}
        unset, by_rows = ({results[path] for path in each if path in results} for each in (self.unset, self.by_rows))
        uses = _uses(traced.jaxpr)
        kept = {variable for equation in _scans(traced.jaxpr) for variable in equation.outvars if uses[variable] == 1}
        equations = [self._without_zeros(one, unset, by_rows, kept) for one in traced.jaxpr.eqns]
        changed = jex.ClosedJaxpr(traced.jaxpr.replace(eqns=equations), traced.consts)
        values = jex.jaxpr_as_fun(changed)(*jax.tree.leaves(arguments))
        found: tuple[dict[str, jax.Array], Any] = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return found

    def _without_zeros(self, equation: Any, unset: set[Any], by_rows: set[Any], kept: set[Any]) -> Any:
        """An equation of the jaxpr, or the loop that takes its place."""
        if not _counts_down(equation) or not unset & set(equation.outvars):
            return equation
        consts, carried = _carried(equation)
        gradients, read = equation.outvars[carried:], equation.invars[consts + carried :]
        may_hold = [number for number, one in enumerate(read) if isinstance(one, jex.Var) and one in kept]
        over: dict[int, int] = {}
        for place, gradient in enumerate(gradients):
            free = (number for number in may_hold if number not in over.values())
            fitting = (number for number in free if self._fits(gradient.aval, read[number].aval))
            if gradient in by_rows & unset and (number := next(fitting, None)) is not None:
                over[place] = number
        zeros = {place for place, gradient in enumerate(gradients) if gradient not in unset}
        body = equation.params["jaxpr"], equation.params["length"]
        loop = partial(_loop, *body, consts, carried, over, zeros)
        shapes = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in equation.invars]
        return equation.replace(primitive=closed_call_p, params={"call_jaxpr": jax.make_jaxpr(loop)(*shapes)})

    def _fits(self, gradient: Any, stack: Any) -> bool:
        """Whether gradients [layers, features, width] fit over activations [layers, rows, seq, width] of a device."""
        if (gradient.ndim, stack.ndim) != (3, 4) or gradient.dtype != stack.dtype:
            return False
        (_, features, width), (_, rows, length, row_width) = gradient.shape, stack.shape
        if not rows or width != row_width or rows % self.devices or features % self.devices:
            return False  # `combine` of `ttpu_jax.ops.moe` keeps no rows, for their shape
        return fits_over(features // self.devices, rows // self.devices, length)


def lies_as_rows(sharding: jax.sharding.Sharding, rows: Sequence[str]) -> bool:
    """Whether the features of a stacked kernel [layers, features, width] lie over the devices of a whole mesh in the
    order in which rows do, and no other dimension of it is divided.

    Args:
        sharding: of the kernel.
        rows: the mesh axes of more than one device that rows lie over.
    """
    if not isinstance(sharding, NamedSharding):
        return not rows
    sizes: Mapping[str, int] = sharding.mesh.shape
    _, entry, *_ = *sharding.spec, None, None
    named: Sequence[str] = () if entry is None else (entry,) if isinstance(entry, str) else entry
    features = [axis for axis in named if sizes[axis] > 1]
    return features == list(rows) and sharding.mesh.size == prod(sizes[axis] for axis in rows)


def _scans(jaxpr: Any) -> list[Any]:
    return [equation for equation in jaxpr.eqns if equation.primitive is scan_p]


def _uses(jaxpr: Any) -> dict[Any, int]:
    """Variable → how often a jaxpr reads it."""
    counts: dict[Any, int] = {}
    for variable in (*(one for equation in jaxpr.eqns for one in equation.invars), *jaxpr.outvars):
        if isinstance(variable, jex.Var):
            counts[variable] = counts.get(variable, 0) + 1
    return {variable: counts.get(variable, 0) for equation in jaxpr.eqns for variable in equation.outvars}


_PARAMETERS = {"reverse", "unroll", "length", "jaxpr"}
"""What is read of a scan's parameters; the loop of a JAX that calls them otherwise is left as it is."""


def _carried(equation: Any) -> tuple[int, int]:
    """How many constants a scan reads, and how many values it carries. They come before the inputs that are read turn
    by turn, which have one dimension more than what a turn reads of them; so do results."""
    body = equation.params["jaxpr"]
    results = zip(equation.outvars, body.out_avals, strict=True)
    inputs = zip(equation.invars, body.in_avals, strict=True)
    carried = sum(one.aval.ndim == turn.ndim for one, turn in results)
    return sum(one.aval.ndim == turn.ndim for one, turn in inputs) - carried, carried


def _counts_down(equation: Any) -> bool:
    """Whether an equation is the loop of a backward pass that writes gradients layer by layer."""
    params = equation.params
    if equation.primitive is not scan_p or equation.effects or not params.keys() >= _PARAMETERS:
        return False
    return params["reverse"] and params["unroll"] == 1


def _loop(
    jaxpr: Any,
    length: int,
    consts_end: int,
    carried: int,
    over: Mapping[int, int],
    zeros: Collection[int],
    *arguments: jax.Array,
) -> list[jax.Array]:
    """What `jax.lax.scan` computes with `reverse`.

    Args:
        jaxpr: a turn.
        length: the number of turns.
        consts_end: the number of constants.
        carried: the number of values that are carried.
        over: number of a result that a turn writes → number of the input that a turn reads which it is written over.
        zeros: numbers of the results that begin with zeros.
        arguments: of the equation: constants, what is carried, and the inputs that are read turn by turn.
    """
    start, turn = consts_end + carried, jex.jaxpr_as_fun(jaxpr)
    written = jaxpr.out_avals[carried:]
    consts, carry, inputs = arguments[:consts_end], list(arguments[consts_end:start]), arguments[start:]
    stacks = [
        inputs[over[place]]
        if place in over
        else (jnp.zeros if place in zeros else jax.lax.empty)((length, *one.shape), one.dtype)
        for place, one in enumerate(written)
    ]

    def body(count: jax.Array, state: tuple[list[jax.Array], list[jax.Array]]) -> tuple[list[Any], list[Any]]:
        carry, stacks = state
        layer = length - 1 - count
        now = dict(enumerate(inputs)) | {number: stacks[place] for place, number in over.items()}
        rows = [_read(now[number], layer) for number in range(len(inputs))]
        results = turn(*consts, *carry, *rows)
        after = [_written(stack, one, layer) for stack, one in zip(stacks, results[len(carry) :], strict=True)]
        return list(results[: len(carry)]), after

    carry, stacks = jax.lax.fori_loop(0, length, body, (carry, stacks))
    found = [_taken(stacks[place], one) if place in over else stacks[place] for place, one in enumerate(written)]
    return [*carry, *found]


def _read(stack: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False, allow_negative_indices=False)


def _written(stack: jax.Array, value: jax.Array, layer: jax.Array) -> jax.Array:
    """A stack with the value of a layer: [layers, *value.shape], or activations [layers, rows, seq, width] over whose
    first tokens a value [features, width] is written."""
    if stack.ndim - 1 == value.ndim:
        return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0, allow_negative_indices=False)
    rows = stack.shape[1]
    parts = value.reshape(1, rows, value.shape[0] // rows, value.shape[1])
    zero = jnp.zeros_like(layer)
    return jax.lax.dynamic_update_slice(stack, parts, (layer, zero, zero, zero), allow_negative_indices=False)


def _taken(stack: jax.Array, value: Any) -> jax.Array:
    """The values [layers, features, width] that `_written` wrote over activations."""
    features, width = value.shape
    return stack[:, :, : features // stack.shape[1]].reshape(len(stack), features, width)

