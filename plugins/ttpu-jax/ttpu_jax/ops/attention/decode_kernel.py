"""The Pallas kernel of `ttpu_jax.ops.attention.decode`."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.arithmetic import attention_flops
from ttpu_jax.ops.attention.blocks import LANES, TWO_CORES, device_kind
from ttpu_jax.ops.attention.blockwise import KeptRunning, scored
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.attention.slot_write import SlotWrite, tile_memory

BLOCK_BYTES = 2**19
"""Of the keys of all heads in one block; two blocks of keys and two of values are in VMEM at once."""
TOGETHER = 4
"""Products that begin together, of a head of a row each: the results of one come long after it began. Of rows that are
computed together each reads the blocks that any of them sees."""
STAYS_IN_HBM = ("TPU v5 lite", "TPU v5e")
"""Chips on which the compiler (libtpu 0.0.42) may not fetch caches into VMEM, where a step writes a row into them, and
copy them back: of gemma-3-12b's windows that is a third more traffic (tensor 8: 8.83 instead of 7.88 ms a step). On v6e
the copies fill time in which HBM is idle (4.22 instead of 4.91 ms)."""


def attended_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    slot: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one device's rows and heads, which first writes a token of each row into the cache if one is given.

    Args:
        query: [batch, kv_heads, q_per_kv, head_dim]; with a slot [batch, kv_heads, q_per_kv + 2, width], where the key
            and the value of the new token follow the queries, and the wider of head_dim and value_dim is the width.
        key: [batch, kv_heads, keys, head_dim]; donated with a slot.
        value: [batch, kv_heads, keys, value_dim]; donated with a slot.
        visible: bool [batch, 1, keys], what each row's query sees, with the new token.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        slot: int32 scalar, where the new token goes in all rows, or None if the cache is only read.
        spec: scale and softcap.
        interpret: run the kernel in the interpreter.

    Returns:
        [batch, kv_heads, q_per_kv, value_dim] in the query's dtype, and keys and values with the new token.
    """
    batch, heads, group = query.shape[:3]
    slots, dim, value_dim = *key.shape[2:], value.shape[3]
    group -= 0 if slot is None else 2
    kind = "" if interpret else device_kind(AttentionContext(mesh=None))
    most = max(1, min(TOGETHER // heads, batch // (2 if kind in TWO_CORES else 1)))
    together = next(count for count in range(most, 0, -1) if batch % count == 0)
    block = block_slots(slots, together * heads * max(dim, value_dim) * key.dtype.itemsize)
    blocks = slots // block
    rows = query.astype(key.dtype)
    logits = jnp.full((heads, group, 1), -jnp.inf, jnp.float32)
    if sinks is not None:
        logits = sinks.astype(jnp.float32)[..., None]
    seen = visible.reshape(batch // together, together, slots).any(1, keepdims=True)
    order, bias = made_apart(block_order(seen, blocks, slot), jnp.where(visible, 0.0, MASKED).astype(jnp.float32))

    # Heads that do not fill whole lanes have slots there, as XLA lays their caches out, so that none is copied.
    keys_last, values_last = bool(dim % LANES), bool(value_dim % LANES)
    key = key.swapaxes(2, 3) if keys_last else key
    value = value.swapaxes(2, 3) if values_last else value

    def blocks_of(size: int, slots_last: bool) -> pl.BlockSpec:
        def place(row: Any, number: Any, *order: Any) -> tuple[Any, ...]:
            seen = block_at(row, number, *order)
            return (row, 0, 0, seen) if slots_last else (row, 0, seen, 0)

        return pl.BlockSpec((together, heads, *((size, block) if slots_last else (block, size))), place)

    def of_rows(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((together, heads, *sizes), lambda row, number, *_: (row, 0, 0, 0))

    caches = in_hbm((key, value), kind)
    sizes = (dim, keys_last), (value_dim, values_last)
    written: tuple[jax.Array, ...] = ()
    tiles: list[Any] = []
    if slot is not None:
        written = caches
        tiles = [tile_memory((together, heads), size, key.dtype, slots_last=last) for size, last in sizes]
    found = pl.pallas_call(
        partial(_kernel, spec=spec, keys_last=keys_last, values_last=values_last, writes=slot is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(order),
            grid=(batch // together, blocks),
            in_specs=[
                of_rows(*rows.shape[2:]),
                *(blocks_of(size, last) for size, last in sizes),
                pl.BlockSpec((together, 1, block), lambda row, number, *order: (row, 0, block_at(row, number, *order))),
                pl.BlockSpec(logits.shape, lambda row, number, *_: (0, 0, 0)),
            ],
            out_specs=[of_rows(group, value_dim), *(pl.BlockSpec(memory_space=pl.ANY) for _ in written)],
            scratch_shapes=[
                *KeptRunning.scratch(together * heads, group, value_dim),
                *tiles,
                *(pltpu.SemaphoreType.DMA for _ in written),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, group, value_dim), query.dtype),
            *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in written),
        ],
        input_output_aliases={len(order) + place: place for place in range(1, len(written) + 1)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=batch * int(attention_flops(heads * group, spec, slots)),
            bytes_accessed=sum(array.nbytes for array in (query, key, value, bias))
            + batch * heads * group * value_dim * query.dtype.itemsize
            + sum(batch // together * prod(tile.shape) * key.dtype.itemsize for tile in tiles),
            transcendentals=batch * heads * group * slots,
        ),
        interpret=interpret,
        name="decode_attention",
    )(*order, rows, *caches, bias, logits)
    mixed, (key, value) = found[0], found[1:] or (key, value)  # the latter as XLA knows them
    return mixed, key.swapaxes(2, 3) if keys_last else key, value.swapaxes(2, 3) if values_last else value


def in_hbm(caches: tuple[jax.Array, ...], kind: str) -> tuple[jax.Array, ...]:
    """The caches [...] that a kernel reads, and may write, which stay in HBM on some kinds of chips. (There libtpu
    0.0.42 compiles no program that is nothing but a kernel that writes them.)"""
    if kind not in STAYS_IN_HBM:
        return caches
    return tuple(pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in caches)


def made_apart(order: tuple[jax.Array, ...], bias: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The order, see `block_order`, and the bias [batch, 1, keys], which XLA makes before anything that uses one.

    Where layers of two kinds see different keys, libtpu 0.0.42 fetches few weights ahead if it may fuse what makes
    these (a step of Ministral-8B on v5e takes 5.30 instead of 3.92 ms, on v6e 2.68 instead of 2.19).
    """
    found: tuple[tuple[jax.Array, ...], jax.Array] = jax.lax.optimization_barrier((order, bias))
    return found


def block_order(visible: jax.Array, blocks: int, slot: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """What `block_at` needs: the first block that each row sees, the last one, and the one that it reads first, which
    is that of `slot` where one is written; then also this slot. All int32, [batch] but for the slot's [1].

    Args:
        visible: bool [batch, 1, keys].
        blocks: into which keys are divided.
        slot: int32 scalar, which all rows write, or None.
    """
    first, last = seen_blocks(visible, blocks)
    begin = first
    if slot is not None:
        slot = jnp.minimum(slot.astype(jnp.int32), visible.shape[-1] - 1)
        begin = jnp.broadcast_to(slot // (visible.shape[-1] // blocks), first.shape)
        first, last = jnp.minimum(first, begin), jnp.maximum(last, begin)
    return (first, last, begin) if slot is None else (first, last, begin, slot.reshape(1))


def block_at(row: Any, number: Any, first: Any, last: Any, begin: Any, *_: Any) -> Any:
    """The block that a step of the grid reads for a row: `begin`, then the others from `first` to `last` in their
    order, and then none: a block that is the one before is not read again.

    Args:
        row: of the batch, or a turn of rows that are computed together.
        number: of the step among those of the row.
        first: int32 [batch], see `block_order`.
        last: int32 [batch], see `block_order`.
        begin: int32 [batch], see `block_order`.
    """
    number = jnp.minimum(number, last[row] - first[row])
    other = first[row] + number - 1
    return jnp.where(number == 0, begin[row], other + (other >= begin[row]).astype(jnp.int32))


def seen_blocks(visible: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last of so many blocks of visible [batch, 1, keys] that each row sees, int32 [batch] each."""
    seen = visible.reshape(len(visible), blocks, -1).any(-1)
    first, from_end = jnp.argmax(seen, axis=1), jnp.argmax(seen[:, ::-1], axis=1)
    return first.astype(jnp.int32), (blocks - 1 - from_end).astype(jnp.int32)


def block_slots(slots: int, bytes_per_slot: int) -> int:
    """Slots in one block: the largest multiple of 128 that divides `slots` and whose keys, `bytes_per_slot` each, take
    no more than `BLOCK_BYTES`; all slots where none does."""
    most = max(LANES, BLOCK_BYTES // bytes_per_slot)
    return next((size for size in range(most - most % LANES, 0, -LANES) if slots % size == 0), slots)


def _kernel(
    first: Any,
    last: Any,
    begin: Any,
    *others: Any,
    spec: AttentionSpec,
    keys_last: bool,
    values_last: bool,
    writes: bool,
) -> None:
    """One block of keys of some rows. others: where a token is written, its slot; then query, key, value, bias and
    logits; mixed, and where a token is written the caches; the states, and where a token is written tiles of keys and
    of values, and a semaphore for each."""
    (turn, number), blocks = map(pl.program_id, (0, 1)), pl.num_programs(1)
    written = []
    if writes:
        slot, query, key, value, bias, logits, mixed, keys, values, *state = others
        *state, key_tile, value_tile, keys_copied, values_copied = state
        where = turn * key.shape[0], slot[0]
        written = [
            SlotWrite(key, query, -2, key_tile, keys, *where, keys_copied, keys_last),
            SlotWrite(value, query, -1, value_tile, values, *where, values_copied, values_last),
        ]
    else:
        query, key, value, bias, logits, mixed, *state = others
    (together, heads), (group, dim) = key.shape[:2], (mixed.shape[2], key.shape[2 if keys_last else 3])
    kept, places = KeptRunning(*state), [divmod(place, heads) for place in range(together * heads)]

    @pl.when(number == 0)
    def _() -> None:
        kept.start(jnp.concatenate([logits[...]] * together))
        for one in written:
            one.start()

    @pl.when(number <= last[turn] - first[turn])
    def _() -> None:
        # Products begin in this order: those of all heads before the first one's next step.
        scores = [
            scored(query[row, head, :group, :dim], key[row, head], bias[row] < 0, spec, keys_last=keys_last)
            for row, head in places
        ]
        states = [kept.load(place) for place in range(len(places))]
        weights = [one.weighed(found) for one, found in zip(states, scores, strict=True)]
        for place, (row, head) in enumerate(places):
            after = states[place].mixed_with(weights[place], value[row, head], values_last=values_last)
            kept.store(place, after)

    @pl.when(number == blocks - 1)
    def _() -> None:
        for place, (row, head) in enumerate(places):
            mixed[row, head] = kept.load(place).result().astype(mixed.dtype)
        for one in written:
            one.wait()
