"""A mixture of experts on one of several devices that have the same tokens and different experts. Each token has a row
for each of its experts, but a device gathers, multiplies and adds only the rows of its own experts.

A device has room for more rows than it has on average (`ttpu_core.sharding.experts`). One with more repeats the
computation until no row is left: but for rounding, values do not depend on the room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_core.sharding.experts import most_rows, room_for_rows
from ttpu_core.spec import MoESpec
from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.ops.moe import ExpertKernels, expert_outputs, run_experts, sorted_by
from ttpu_jax.ops.parts import OVERFLOW, filled

TOKENS = 128
"""Tokens whose rows one product adds up."""


def why_not_local(x: jax.Array, kernels: ExpertKernels, platform: str, inner_axes: tuple[str, ...]) -> str | None:
    """Why `run_local` does not serve rows x [tokens, hidden] and these experts, or None."""
    if platform.startswith("tpu") and x.dtype.itemsize != 2:
        return "a TPU adds rows by products, which round float32"
    down = kernels.down
    if inner_axes and isinstance(down, QuantizedKernel):
        form = down.format.activation
        if down.input_order is not None or (form is not None and not form.static):
            return "devices exchange features of each row, or the largest, and may repeat that unequally often"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 7, 8))
def run_local(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: ExpertKernels,
    spec: MoESpec,
    platform: str,
    first: jax.Array,
    inner_axes: tuple[str, ...],
    dtype: jnp.dtype,
) -> jax.Array:
    """`run_experts` of a device that has some of the experts. Where gradients are asked for, `run_experts` itself.

    Args:
        x: [tokens, hidden].
        chosen: [tokens, count], indices of experts, most of them elsewhere; of padding any that no device has, so that
            it needs no room.
        weights: [tokens, count], cast to x's dtype.
        kernels: parameters of the experts from index `first` on.
        spec: the mixture.
        platform: platform of the devices, see `grouped_linear`.
        first: scalar, the index of the first expert in `kernels`.
        inner_axes: mesh axes that shard the experts' inner dimension, inside a shard_map.
        dtype: of the result.

    Returns:
        [tokens, hidden]. The devices' results must be added.
    """
    tokens, count = chosen.shape
    experts = kernels.up.shape[0]
    shared_by = spec.choices / experts
    room = room_for_rows(tokens, count, experts, 1, shared_by)
    expert = chosen.T.reshape(-1) - first
    here = (expert >= 0) & (expert < experts)
    sorting, sizes = sorted_by(jnp.where(here, expert, experts), experts, here)
    weight = weights.T.reshape(-1).astype(x.dtype)
    number = jnp.arange(experts)
    ends = jnp.where(number[:, None] >= number, sizes, 0).sum(1)  # a cumulative sum, in one small program

    def add(window: jax.Array, sums: jax.Array) -> jax.Array:
        padded = jnp.pad(sorting.order, (0, -len(expert) % room))
        return added_to(sums, jax.lax.dynamic_slice_in_dim(padded, window * room, room), window * room)

    def added_to(sums: jax.Array | None, rows: jax.Array, begin: jax.Array | int) -> jax.Array:
        """`sums` with what these sorted rows give, of which `begin` are before."""
        token, there = rows % tokens, begin + jnp.arange(room) < ends[-1]
        of_window = jnp.clip(ends - begin, 0, room) - jnp.clip(ends - sizes - begin, 0, room)
        with filled(tokens * count / shared_by / room):
            out = expert_outputs(
                x[token], weight[rows][:, None], jnp.where(there, expert[rows], experts), of_window, kernels, spec,
                platform, inner_axes,
            )  # fmt: skip
            return _added(out, jnp.where(there, token, tokens), tokens, dtype, sums, platform)

    sums = added_to(None, sorting.order[:room], 0)
    if room == most_rows(tokens, count, experts, 1):
        return sums
    with jax.named_scope(OVERFLOW):
        return jax.lax.fori_loop(1, -(-ends[-1] // room), add, sums)


def _added(
    rows: jax.Array,
    token_of_row: jax.Array,
    num_tokens: int,
    dtype: jnp.dtype,
    sums: jax.Array | None,
    platform: str,
) -> jax.Array:
    """`sums` [tokens, hidden] (None: zeros) with the rows of each token, added in float32.

    A TPU multiplies the rows of 128 tokens by zeros and ones that say which rows are whose: its scatter takes one row
    after another. What is not finite counts as the largest finite number there, so that it reaches no other token.

    Args:
        rows: [rows, hidden]; those of no token may be anything.
        token_of_row: int [rows], in any order; `num_tokens` for none.
        num_tokens: of the result.
        dtype: of the result, and of `sums`.
        sums: [tokens, hidden], or None.
        platform: of the devices.
    """
    hidden = rows.shape[1]
    if not platform.startswith("tpu"):
        begin = jnp.zeros((num_tokens, hidden), jnp.float32) if sums is None else sums.astype(jnp.float32)
        return begin.at[token_of_row].add(rows.astype(jnp.float32), mode="drop").astype(dtype)
    from ttpu_jax.ops import grouped_gradient_tpu  # Pallas takes 0.4 s to import

    blocks = -(-num_tokens // TOKENS)
    order = jnp.argsort(token_of_row)
    token = token_of_row[order]
    block = jnp.where(token < num_tokens, token // TOKENS, blocks)
    sizes = (block[:, None] == jnp.arange(blocks)).sum(0, dtype=jnp.int32)
    one_of = (token[:, None] % TOKENS == jnp.arange(TOKENS)).astype(rows.dtype)
    shape = jax.ShapeDtypeStruct((blocks, TOKENS, hidden), dtype)
    if sums is not None:
        sums = jnp.pad(sums, ((0, -num_tokens % TOKENS), (0, 0))).reshape(shape.shape)
    found = grouped_gradient_tpu.kernel_gradient(
        rows[order], one_of, sizes, shape, sums, finite=True, interpret=platform != "tpu"
    )
    return found.reshape(-1, hidden)[:num_tokens]


def _with_gradients(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: ExpertKernels,
    spec: MoESpec,
    platform: str,
    first: jax.Array,
    inner_axes: tuple[str, ...],
    dtype: jnp.dtype,
) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
    def run(x: jax.Array, weights: jax.Array, kernels: ExpertKernels) -> jax.Array:
        return run_experts(x, chosen, weights, kernels, spec, platform, first, inner_axes).astype(dtype)

    return jax.vjp(run, x, weights, kernels)


def _gradients(
    spec: MoESpec,
    platform: str,
    inner_axes: tuple[str, ...],
    dtype: jnp.dtype,
    back: Callable[[jax.Array], tuple[Any, ...]],
    gradient: jax.Array,
) -> tuple[Any, ...]:
    to_x, to_weights, to_kernels = back(gradient)
    return to_x, None, to_weights, to_kernels, None


run_local.defvjp(_with_gradients, _gradients)
