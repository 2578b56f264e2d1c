"""The Pallas kernel of `ttpu_jax.ops.attention.latent_decode`."""

from __future__ import annotations

from functools import partial
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
from ttpu_jax.ops.attention.decode_kernel import STAYS_IN_HBM, block_slots, seen_blocks
from ttpu_jax.ops.attention.reference import MASKED


def attended_latents(
    query: jax.Array,
    turned: jax.Array,
    latent: jax.Array,
    rope_key: jax.Array,
    visible: jax.Array,
    *,
    spec: AttentionSpec,
    interpret: bool,
) -> jax.Array:
    """Attention of one device's rows and heads to latents, which are keys and values of all heads.

    Args:
        query: [batch, heads, rank].
        turned: [batch, heads, rope_dim], the rotated features of the queries.
        latent: [batch, slots, rank].
        rope_key: [batch, slots, rope_dim].
        visible: bool [batch, 1, slots], what each row's query sees.
        spec: of `ttpu_core.spec.latent_attention.latent_pages`.
        interpret: run the kernel in the interpreter.

    Returns:
        [batch, heads, rank] in the latents' dtype.
    """
    (batch, heads, rank), slots, dim = query.shape, latent.shape[1], turned.shape[-1]
    # A block has as many bytes as one of keys and one of values of other layers have.
    block = block_slots(slots, rank * latent.dtype.itemsize // 2)
    blocks = slots // block
    first, last = seen_blocks(visible, blocks)
    bias = jnp.where(visible, 0.0, MASKED).astype(jnp.float32)
    rope_key = rope_key.swapaxes(1, 2)  # few features do not fill lanes, and XLA lays such a cache out so
    if not interpret and device_kind(AttentionContext(mesh=None)) in STAYS_IN_HBM:
        latent, rope_key = (pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in (latent, rope_key))

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, number, *_: (row, *(0 for _ in shape)))

    def seen(row: Any, number: Any, first: Any, last: Any) -> Any:
        return jnp.clip(number, first[row], last[row])  # a block that is the one before is not read again

    mixed: jax.Array = pl.pallas_call(
        partial(_kernel, spec=spec, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, blocks),
            in_specs=[
                of_row(heads, rank),
                of_row(heads, dim),
                pl.BlockSpec((1, block, rank), lambda row, number, *ends: (row, seen(row, number, *ends), 0)),
                pl.BlockSpec((1, dim, block), lambda row, number, *ends: (row, 0, seen(row, number, *ends))),
                pl.BlockSpec((1, 1, block), lambda row, number, *ends: (row, 0, seen(row, number, *ends))),
            ],
            out_specs=of_row(heads, rank),
            scratch_shapes=KeptRunning.scratch(1, heads, rank),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rank), latent.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=batch * int(attention_flops(heads, spec, slots)),
            bytes_accessed=sum(array.nbytes for array in (query, query, turned, latent, rope_key, bias)),
            transcendentals=batch * heads * slots,
        ),
        interpret=interpret,
        name="latent_decode_attention",
    )(first, last, query.astype(latent.dtype), turned.astype(latent.dtype), latent, rope_key, bias)
    return mixed


def _kernel(
    first: Any,
    last: Any,
    query: Any,
    turned: Any,
    latent: Any,
    rope_key: Any,
    bias: Any,
    mixed: Any,
    *state: Any,
    spec: AttentionSpec,
    blocks: int,
) -> None:
    """One block of latents of one row, read once as keys and values."""
    row, number, kept = pl.program_id(0), pl.program_id(1), KeptRunning(*state)

    @pl.when(number == 0)
    def _() -> None:
        kept.start()

    @pl.when((number >= first[row]) & (number <= last[row]))
    def _() -> None:
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
    def _() -> None:
        mixed[0] = kept.load(0).result().astype(mixed.dtype)
