"""The Pallas kernel of `ttpu_jax.ops.attention.latent_decode`."""

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
from ttpu_jax.ops.attention.blocks import device_kind
from ttpu_jax.ops.attention.blockwise import KeptRunning
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.decode_kernel import block_at, block_order, block_slots, in_hbm, made_apart
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.attention.slot_write import SlotWrite, tile_memory


def attended_latents(
    query: jax.Array,
    turned: jax.Array,
    latent: jax.Array,
    rope_key: jax.Array,
    visible: jax.Array,
    new: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    *,
    spec: AttentionSpec,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one device's rows and heads to latents, which are keys and values of all heads, and to which a token
    of each row is written first.

    Args:
        query: [batch, heads, rank].
        turned: [batch, heads, rope_dim], the rotated features of the queries.
        latent: [batch, slots, rank], donated.
        rope_key: [batch, slots, rope_dim], donated.
        visible: bool [batch, 1, slots], what each row's query sees, with the new token.
        new: the token's latent [batch, 1, rank] and rotated key [batch, 1, rope_dim].
        slot: int32 scalar, where the token goes in all rows.
        spec: of `ttpu_core.spec.latent_attention.latent_pages`.
        interpret: run the kernel in the interpreter.

    Returns:
        [batch, heads, rank] in the latents' dtype, and the latents and rotated keys with the new token.
    """
    (batch, heads, rank), slots, dim = query.shape, latent.shape[1], turned.shape[-1]
    # A block has as many bytes as one of keys and one of values of other layers have.
    block = block_slots(slots, rank * latent.dtype.itemsize // 2)
    blocks = slots // block
    order, bias = made_apart(block_order(visible, blocks, slot), jnp.where(visible, 0.0, MASKED).astype(jnp.float32))
    rope_key = rope_key.swapaxes(1, 2)  # few features do not fill lanes, and XLA lays such a cache out so
    kind = "" if interpret else device_kind(AttentionContext(mesh=None))
    caches = in_hbm((latent, rope_key), kind)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, number, *_: (row, *(0 for _ in shape)))

    tiles = [
        tile_memory((1,), size, latent.dtype, slots_last=last) for size, last in ((rank, False), (dim, True))
    ]
    found = pl.pallas_call(
        partial(_kernel, spec=spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(order),
            grid=(batch, blocks),
            in_specs=[
                of_row(heads, rank),
                of_row(heads, dim),
                pl.BlockSpec((1, block, rank), lambda row, number, *order: (row, block_at(row, number, *order), 0)),
                pl.BlockSpec((1, dim, block), lambda row, number, *order: (row, 0, block_at(row, number, *order))),
                pl.BlockSpec((1, 1, block), lambda row, number, *order: (row, 0, block_at(row, number, *order))),
                of_row(1, rank),
                of_row(1, dim),
            ],
            out_specs=[of_row(heads, rank), *[pl.BlockSpec(memory_space=pl.ANY)] * len(caches)],
            scratch_shapes=[
                *KeptRunning.scratch(1, heads, rank),
                *tiles,
                *[pltpu.SemaphoreType.DMA] * len(caches),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, rank), latent.dtype),
            *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches),
        ],
        input_output_aliases={len(order) + 2: 1, len(order) + 3: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=batch * int(attention_flops(heads, spec, slots)),
            bytes_accessed=sum(array.nbytes for array in (query, query, turned, latent, rope_key, bias))
            + sum(batch * prod(tile.shape) * latent.dtype.itemsize for tile in tiles),
            transcendentals=batch * heads * slots,
        ),
        interpret=interpret,
        name="latent_decode_attention",
    )(*order, *(one.astype(latent.dtype) for one in (query, turned)), *caches, bias, *new)
    mixed, latent, rope_key = found
    return mixed, latent, rope_key.swapaxes(1, 2)


def _kernel(
    first: Any,
    last: Any,
    _: Any,
    slot: Any,
    query: Any,
    turned: Any,
    latent: Any,
    rope_key: Any,
    bias: Any,
    new_latent: Any,
    new_key: Any,
    mixed: Any,
    latents: Any,
    rope_keys: Any,
    *others: Any,
    spec: AttentionSpec,
) -> None:
    """One block of latents of one row, read once as keys and values. others: the state, tiles of latents and of rotated
    keys, and a semaphore for each."""
    (row, number), blocks = map(pl.program_id, (0, 1)), pl.num_programs(1)
    *state, latent_tile, key_tile, latent_copied, key_copied = others
    kept, where = KeptRunning(*state), (row, slot[0])
    written = [
        SlotWrite(latent, new_latent, -1, latent_tile, latents, *where, latent_copied, slots_last=False),
        SlotWrite(rope_key, new_key, -1, key_tile, rope_keys, *where, key_copied, slots_last=True),
    ]

    @pl.when(number == 0)
    def start() -> None:
        kept.start()
        for one in written:
            one.start()

    @pl.when(number <= last[row] - first[row])
    def attend() -> None:
        precision = jax.lax.Precision.HIGHEST if rope_key.dtype == jnp.float32 else None
        beside = jax.lax.dot_general(
            turned[0],
            rope_key[0],
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        kept.store(0, kept.load(0).attended(query[0], latent[0], latent[0], bias[0] < 0, spec, beside=beside))

    @pl.when(number == blocks - 1)
    def end() -> None:
        mixed[0] = kept.load(0).result().astype(mixed.dtype)
        for one in written:
            one.wait()
