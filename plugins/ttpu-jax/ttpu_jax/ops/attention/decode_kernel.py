"""The Pallas kernel of `ttpu_jax.ops.attention.decode`."""

from __future__ import annotations

from functools import partial
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
    *,
    spec: AttentionSpec,
    interpret: bool,
) -> jax.Array:
    """Attention of one device's rows and heads.

    Args:
        query: [batch, kv_heads, q_per_kv, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        visible: bool [batch, 1, keys], what each row's query sees.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        spec: scale and softcap.
        interpret: run the kernel in the interpreter.

    Returns:
        [batch, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    batch, heads, group, dim = query.shape
    slots, value_dim = key.shape[2], value.shape[3]
    kind = "" if interpret else device_kind(AttentionContext(mesh=None))
    most = max(1, min(TOGETHER // heads, batch // (2 if kind in TWO_CORES else 1)))
    together = next(count for count in range(most, 0, -1) if batch % count == 0)
    block = block_slots(slots, together * heads * max(dim, value_dim) * key.dtype.itemsize)
    blocks = slots // block
    rows = query.astype(key.dtype)
    logits = jnp.full((heads, group, 1), -jnp.inf, jnp.float32)
    if sinks is not None:
        logits = sinks.astype(jnp.float32)[..., None]
    first, last = seen_blocks(visible.reshape(batch // together, together, slots).any(1, keepdims=True), blocks)
    bias = jnp.where(visible, 0.0, MASKED).astype(jnp.float32)

    def seen_block(row: Any, number: Any, first: Any, last: Any) -> Any:
        return jnp.clip(number, first[row], last[row])  # a block that is the one before is not read again

    # Heads that do not fill whole lanes have slots there, as XLA lays their caches out, so that none is copied.
    keys_last, values_last = bool(dim % LANES), bool(value_dim % LANES)
    key = key.swapaxes(2, 3) if keys_last else key
    value = value.swapaxes(2, 3) if values_last else value

    def blocks_of(size: int, slots_last: bool) -> pl.BlockSpec:
        def place(row: Any, number: Any, *ends: Any) -> tuple[Any, ...]:
            seen = seen_block(row, number, *ends)
            return (row, 0, 0, seen) if slots_last else (row, 0, seen, 0)

        return pl.BlockSpec((together, heads, *((size, block) if slots_last else (block, size))), place)

    whole = pl.BlockSpec((together, heads, group, dim), lambda row, number, *_: (row, 0, 0, 0))
    if kind in STAYS_IN_HBM:
        key, value = (pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in (key, value))
    mixed: jax.Array = pl.pallas_call(
        partial(_kernel, spec=spec, blocks=blocks, keys_last=keys_last, values_last=values_last),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch // together, blocks),
            in_specs=[
                whole,
                blocks_of(dim, keys_last),
                blocks_of(value_dim, values_last),
                pl.BlockSpec((together, 1, block), lambda row, number, *ends: (row, 0, seen_block(row, number, *ends))),
                pl.BlockSpec(logits.shape, lambda row, number, *_: (0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((together, heads, group, value_dim), lambda row, number, *_: (row, 0, 0, 0)),
            scratch_shapes=KeptRunning.scratch(together * heads, group, value_dim),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, group, value_dim), query.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=batch * int(attention_flops(heads * group, spec, slots)),
            bytes_accessed=sum(array.nbytes for array in (query, key, value, bias))
            + batch * heads * group * value_dim * query.dtype.itemsize,
            transcendentals=batch * heads * group * slots,
        ),
        interpret=interpret,
        name="decode_attention",
    )(first, last, rows, key, value, bias, logits)
    return mixed


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
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    logits: Any,
    mixed: Any,
    *state: Any,
    spec: AttentionSpec,
    blocks: int,
    keys_last: bool,
    values_last: bool,
) -> None:
    """One block of keys of some rows."""
    turn, number = pl.program_id(0), pl.program_id(1)
    together, heads = key.shape[:2]
    kept, places = KeptRunning(*state), [divmod(place, heads) for place in range(together * heads)]

    @pl.when(number == 0)
    def _() -> None:
        kept.start(jnp.concatenate([logits[...]] * together))

    @pl.when((number >= first[turn]) & (number <= last[turn]))
    def _() -> None:
        # Products begin in this order: those of all heads before the first one's next step.
        scores = [
            scored(query[row, head], key[row, head], bias[row] < 0, spec, keys_last=keys_last) for row, head in places
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
