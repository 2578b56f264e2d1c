"""Writing into the contiguous cache: one token goes by another way than several, to the same place, and without a copy
of the cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.rope import NO_ROPE
from ttpu_jax.model.cache import LayerCache
from ttpu_jax.ops.attention import AttentionContext, eager

LAYERS, BATCH, HEADS, SLOTS, DIM = 3, 2, 4, 8, 5


@pytest.mark.parametrize("seq", [1, 3])
def test_a_write_fills_its_slots_of_its_layer_and_nothing_else(seq: int) -> None:
    turn, slot = 1, 4
    key, value = jax.random.normal(jax.random.key(0), (2, BATCH, HEADS, seq, DIM))
    before = jax.random.normal(jax.random.key(1), (LAYERS, BATCH, HEADS, SLOTS, DIM))
    write = jax.jit(LayerCache.write)
    stacked = write(LayerCache(before, -before), key, value, jnp.int32(slot), jnp.int32(turn))
    alone = write(LayerCache(before[turn], -before[turn]), key, value, jnp.int32(slot))
    for written, one, old, new in (
        (stacked.key, alone.key, before, key),
        (stacked.value, alone.value, -before, value),
    ):
        expected = np.array(old)
        expected[turn, :, :, slot : slot + seq] = new
        np.testing.assert_array_equal(written, expected)
        np.testing.assert_array_equal(one, expected[turn])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_copies_no_cache_on_a_cpu(batch: int, heads: int, dtype: str) -> None:
    """XLA:CPU copied the cache four times a step of one row, which took twice as long after 512 tokens for that."""
    slots, dim = 256, 64
    spec = AttentionSpec(num_heads=2 * heads, num_kv_heads=heads, head_dim=dim, rope=NO_ROPE)

    def step(cache: LayerCache, query: jax.Array, new: jax.Array, slot: jax.Array) -> tuple[LayerCache, jax.Array]:
        cache = cache.write(new, new, slot)
        queries, keys = jnp.broadcast_to(slot, (batch, 1)), jnp.broadcast_to(jnp.arange(slots), (batch, slots))
        context = AttentionContext(platform="cpu", own_keys=False)
        return cache, eager(query, cache.key, cache.value, queries, keys, spec, context=context)

    held = jax.ShapeDtypeStruct((batch, heads, slots, dim), dtype)
    query = jax.ShapeDtypeStruct((batch, 1, heads, 2, dim), dtype)
    new = jax.ShapeDtypeStruct((batch, heads, 1, dim), dtype)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(step, donate_argnums=0).lower(LayerCache(held, held), query, new, slot).compile().as_text()
    assert "dynamic-update-slice" in text
    assert not re.findall(rf"\[{batch},{heads},{slots},{dim}\]\S* copy\(", text)
