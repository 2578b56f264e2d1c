"""A mixture of experts whose tokens and experts are divided over the same devices (arXiv 2006.16668). Each row of an
assignment is sent to the device of its expert, and what the expert gives it is sent back; devices send as many rows as
they have, and no row is dropped.

A device has room for more rows than it receives on average (`ttpu_core.sharding.experts`). Where one of them has more
than that, all exchange again until none is left: but for the rounding of kernels' gradients, values do not depend on
the room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.sharding.experts import most_rows, room_for_rows
from ttpu_core.spec import MoESpec
from ttpu_jax.ops.exchange import Deliveries, Pieces, deliveries, exchange
from ttpu_jax.ops.grouped import SummedKernels
from ttpu_jax.ops.moe import ExpertKernels, Sorting, combine, dispatch, expert_outputs, sorted_by, weights_of
from ttpu_jax.ops.parts import OVERFLOW, filled

LANES = 128
PARTS, PART, NARROW = 2, 512, 4096
"""In how many parts a device's tokens are exchanged, one while experts multiply another; the fewest tokens of a part,
as experts' kernels are read for each; and the most inner features of experts whose rows travel for about as long as
they are multiplied: wider ones are given all tokens at once."""


@dataclass(frozen=True)
class ExchangedExperts:
    """How a mixture's experts are divided over devices that exchange their tokens.

    Attributes:
        spec: the mixture.
        platform: of the devices, see `grouped_linear`.
        by_experts: mesh axis → devices, those that divide the experts, the slowest first.
        exchanging: those of them that divide the tokens too. Devices along the others have the same tokens.
        others: the other mesh axes that lie within a slice.
        inner_axes: mesh axes that shard the experts' inner dimension.
        padded: whether tokens of padding have chosen no expert.
    """

    spec: MoESpec
    platform: str
    by_experts: tuple[tuple[str, int], ...]
    exchanging: tuple[str, ...]
    others: tuple[str, ...]
    inner_axes: tuple[str, ...] = ()
    padded: bool = False

    @property
    def devices(self) -> int:
        """How many exchange their tokens."""
        return prod(size for axis, size in self.by_experts if axis in self.exchanging)

    @property
    def same(self) -> int:
        """How many have the same tokens, and other experts."""
        return prod(size for axis, size in self.by_experts if axis not in self.exchanging)

    def destination(self, expert: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
        """The device of each expert [...] among those that exchange, and whether it is along this device's other axes.

        Args:
            expert: int [...].
            experts: of a device.
        """
        block, blocks = expert // experts, prod(size for _, size in self.by_experts)
        found = (expert >= 0) & (block < blocks)  # others return their input, or are no experts
        device, left = jnp.zeros_like(expert), blocks
        for axis, size in self.by_experts:
            left //= size
            place = block // left % size
            if axis in self.exchanging:
                device = device * size + place
            else:
                found &= place == jax.lax.axis_index(axis)
        return device, found


def run_exchanged(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, kernels: ExpertKernels, how: ExchangedExperts
) -> jax.Array:
    """The weighted sum of each token's experts' outputs, over the experts of the devices that exchange. In a shard_map.

    Args:
        x: [tokens, hidden].
        chosen: int [tokens, count], indices of experts; `spec.choices` is none.
        weights: [tokens, count], cast to x's dtype.
        kernels: parameters of this device's experts.
        how: how the experts are divided.

    Returns:
        float32 [tokens, hidden]. Results of devices along the other axes of experts, and along the axes of their inner
        dimension, must be added.
    """
    count = chosen.shape[1]
    parts = PARTS if how.spec.intermediate_size <= NARROW and len(x) % PARTS == 0 and len(x) >= PARTS * PART else 1
    x_parts, chosen_parts, weight_parts = (jnp.split(array, parts) for array in (x, chosen, weights))
    given = tuple(
        _sorted_rows(*part, kernels.up.shape[0], how)
        for part in zip(x_parts, chosen_parts, weight_parts, strict=True)
    )
    results = _results(tuple((one.rows, one.weight) for one in given), kernels, tuple(one.table for one in given), how)
    sums = [combine(rows, one.sorting, count) for rows, one in zip(results, given, strict=True)]
    return sums[0] if parts == 1 else jnp.concatenate(sums)


class _SortedRows(NamedTuple):
    """Tokens' rows [assignments, ...] in the order of their experts, their weights [assignments, 1], how they are
    sorted, and what devices send each other."""

    rows: jax.Array
    weight: jax.Array
    sorting: Sorting
    table: Deliveries


def _sorted_rows(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: int, how: ExchangedExperts
) -> _SortedRows:
    """The rows of tokens x [tokens, hidden]; `experts` are on each device."""
    count = chosen.shape[1]
    expert = chosen.T.reshape(-1)
    device, found = how.destination(expert, experts)
    groups = how.devices * experts
    every = how.spec.choices == how.spec.num_experts and len(how.exchanging) == len(how.by_experts) and not how.padded
    group = jnp.where(found, device * experts + expert % experts, groups)
    sorting, sizes = sorted_by(group, groups, None if every else found)
    table = deliveries(jax.lax.all_gather(sizes.reshape(how.devices, experts), how.exchanging))
    return _SortedRows(dispatch(_in_words(x), sorting, count), weights_of(weights, sorting, x.dtype), sorting, table)


def _in_words(x: jax.Array) -> jax.Array:
    """x [rows, features] as [rows, words, features / words], in which a TPU has each row in one piece, as it sends and
    gathers it: 32 bits of a tile come from so many features."""
    words = 4 // x.dtype.itemsize
    return x.reshape(len(x), words, -1) if words > 1 and x.shape[1] % (words * LANES) == 0 else x[:, None]


Rows = tuple[tuple[jax.Array, jax.Array], ...]
"""Of each part: rows [assignments, ...] and their weights [assignments, 1]."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _results(
    parts: Rows, kernels: ExpertKernels, tables: tuple[Deliveries, ...], how: ExchangedExperts
) -> tuple[jax.Array, ...]:
    """What experts give the rows of each part times their weights, in the shape of the rows; undefined for those that
    are sent nowhere, and so are their gradients."""

    def visit(rows: jax.Array, weight: jax.Array, window: _Window, out: jax.Array) -> jax.Array:
        given = window.outputs(window.fetched(rows), window.fetched_lanes(weight), kernels)
        return window.returned(given, out)

    found = []
    for (rows, weight), table in zip(parts, tables, strict=True):
        first = unset(rows.shape, rows.dtype, table.sizes, how.platform)
        found.append(_in_windows(partial(visit, rows, weight), first, rows, kernels, table, how))
    return tuple(found)


def _results_gradients(
    how: ExchangedExperts,
    residuals: tuple[Rows, ExpertKernels, tuple[Deliveries, ...]],
    gradients: tuple[jax.Array, ...],
) -> tuple[Any, ...]:
    """Rows are fetched again, and so are the gradients of what they were given; those of the kernels stay, and each
    part adds to those of the parts before."""
    parts, kernels, tables = residuals
    leaves, tree = jax.tree.flatten(kernels)
    trained = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def adds(place: int, rows: jax.Array) -> bool:
        """Whether the product's gradient is added to that of other rows where it is computed."""
        leaf = leaves[place]
        return any(leaf is kernel for kernel in (kernels.up, kernels.down)) and leaf.dtype == rows.dtype

    def outputs(
        window: _Window, sums: list[jax.Array] | None, rows: jax.Array, weight: jax.Array, given: list[jax.Array]
    ) -> jax.Array:
        whole: list[Any] = list(leaves)
        for number, place in enumerate(trained):
            whole[place] = given[number]
            if sums is not None and adds(place, rows):
                whole[place] = SummedKernels(given[number], sums[number])
        return window.outputs(rows, weight, jax.tree.unflatten(tree, whole))

    def visit(
        rows: jax.Array, weight: jax.Array, gradient: jax.Array, window: _Window, sums: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        to_rows, to_weight, to_kernels = sums
        values = window.fetched(rows), window.fetched_lanes(weight), [leaves[place] for place in trained]
        _, back = jax.vjp(partial(outputs, window, to_kernels), *values)
        by_rows, by_weight, by_kernels = back(window.fetched(gradient))
        if to_kernels is not None:
            pairs = zip(trained, to_kernels, by_kernels, strict=True)
            by_kernels = [by if adds(place, rows) else so_far + by for place, so_far, by in pairs]
        return window.returned(by_rows, to_rows), window.returned(_lanes(by_weight), to_weight), by_kernels

    to_parts, to_kernels = [], None
    for (rows, weight), table, gradient in zip(parts, tables, gradients, strict=True):
        begin = partial(unset, sizes=table.sizes, platform=how.platform)
        first = begin(rows.shape, rows.dtype), begin((len(rows), 1, LANES), jnp.float32), to_kernels
        visit_part = partial(visit, rows, weight, gradient)
        to_rows, to_weight, to_kernels = _in_windows(visit_part, first, rows, kernels, table, how)
        to_parts.append((to_rows, to_weight[:, 0, :1].astype(weight.dtype)))
    assert to_kernels is not None
    none = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    found = dict(zip(trained, to_kernels, strict=True))
    of_kernels = jax.tree.unflatten(tree, [found.get(place, leaf) for place, leaf in enumerate(none)])
    return tuple(to_parts), of_kernels, None


_results.defvjp(lambda *values: (_results(*values), values[:-1]), _results_gradients)


def unset(shape: tuple[int, ...], dtype: Any, sizes: jax.Array, platform: str) -> jax.Array:
    """An array whose numbers are undefined, perhaps not even numbers: a TPU writes zeros for as long as the rows that
    replace them take.

    Args:
        shape: of the array.
        dtype: of the array.
        sizes: int32 [...], an array of the layer. The result depends on it, so that JAX does not make one array for all
            layers of a loop, which each of them would copy.
        platform: of the devices; on GPUs, where unset memory was never tried, the numbers are zeros.

    Returns:
        [*shape].
    """
    if platform == "gpu":
        return jnp.zeros(shape, dtype)
    make = partial(jax.lax.empty, shape, dtype)
    return jax.lax.cond(sizes.reshape(-1)[0] >= 0, make, make)


@dataclass(frozen=True)
class _Window:
    """The rows that devices receive at once.

    there: the pieces that bring them.
    back: the pieces that return what they were given.
    sizes: int32 [experts], the rows of each of this device's experts.
    room: rows of the buffer.
    mean: rows that a device receives on average.
    """

    there: Pieces
    back: Pieces
    sizes: jax.Array
    room: int
    mean: float
    how: ExchangedExperts

    def fetched(self, rows: jax.Array) -> jax.Array:
        """This device's rows of rows [assignments, ...] of all: [room, features]."""
        into = unset((self.room, *rows.shape[1:]), rows.dtype, self.sizes, self.how.platform)
        return exchange(rows, into, self.there, self.how.exchanging, self.how.platform).reshape(self.room, -1)

    def fetched_lanes(self, weight: jax.Array) -> jax.Array:
        """`fetched` of weight [assignments, 1]."""
        return self.fetched(_lanes(weight))[:, :1].astype(weight.dtype)

    def returned(self, rows: jax.Array, to: jax.Array) -> jax.Array:
        """`to` [assignments, ...] with this device's rows [room, features] of all devices."""
        return exchange(rows.reshape(len(rows), *to.shape[1:]), to, self.back, self.how.exchanging, self.how.platform)

    def outputs(self, rows: jax.Array, weight: jax.Array, kernels: ExpertKernels) -> jax.Array:
        """What this device's experts give rows [room, hidden] times weight [room, 1], in the shape of rows."""
        expert = jnp.searchsorted(jnp.cumsum(self.sizes), jnp.arange(self.room), side="right")
        how = self.how
        with filled(min(1.0, self.mean / self.room)):
            return expert_outputs(rows, weight, expert, self.sizes, kernels, how.spec, how.platform, how.inner_axes)


def _lanes(weight: jax.Array) -> jax.Array:
    """weight [rows, 1] as float32 [rows, 1, lanes]: a TPU sends whole lanes."""
    return jnp.broadcast_to(weight.astype(jnp.float32)[..., None], (len(weight), 1, LANES))


def _in_windows(
    visit: Callable[[_Window, Any], Any],
    first: Any,
    rows: jax.Array,
    kernels: ExpertKernels,
    table: Deliveries,
    how: ExchangedExperts,
) -> Any:
    """`visit(window, result so far)` for all rows that any device receives."""
    choices = how.spec.experts_per_token
    sizes = len(rows) // choices, choices, kernels.up.shape[0], how.devices
    room, mean = room_for_rows(*sizes, how.same), len(rows) / how.same
    device = jax.lax.axis_index(how.exchanging)

    def visited(index: jax.Array | int, result: Any) -> Any:
        return visit(_Window(*table.window(index * room, room, device), room, mean, how), result)

    result = visited(0, first)
    if room == most_rows(*sizes):
        return result
    windows = -(-table.busiest // room)
    if how.others:  # whose devices run the same collectives at the same time, within groups of their own
        windows = jax.lax.pmax(windows, how.others)
    with jax.named_scope(OVERFLOW):
        return jax.lax.fori_loop(1, windows, visited, result)
