"""Writing into the cache of stacked layers: one token goes by another way than several, to the same place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_jax.model.cache import LayerCache

LAYERS, BATCH, HEADS, SLOTS, DIM = 3, 2, 4, 8, 5


@pytest.mark.parametrize("seq", [1, 3])
def test_a_write_fills_its_slots_of_its_layer_and_nothing_else(seq: int) -> None:
    turn, slot = 1, 4
    key, value = jax.random.normal(jax.random.key(0), (2, BATCH, HEADS, seq, DIM))
    before = jax.random.normal(jax.random.key(1), (LAYERS, BATCH, HEADS, SLOTS, DIM))
    write = jax.jit(LayerCache.write)
    after = write(LayerCache(before, -before), key, value, jnp.int32(slot), jnp.int32(turn))
    for written, old, new in ((after.key, before, key), (after.value, -before, value)):
        expected = np.array(old)
        expected[turn, :, :, slot : slot + seq] = new
        np.testing.assert_array_equal(written, expected)
