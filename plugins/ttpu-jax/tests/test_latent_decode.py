"""The kernel for decode steps of latent attention is held against the absorbed form. On a CPU it is interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.attention.latent_decode import latent_decode, serves
from ttpu_jax.ops.attention.reference import MASKED, visibility

SPEC = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=256 + 16, v_head_dim=256, scale=0.05)
CONTEXT = AttentionContext(platform="cpu", own_keys=False)
SLOTS = 384


def arrays(ends: tuple[int, ...] = (300, 1, 384), dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Queries, latents and positions of rows whose newest token is at `ends` - 1 slots after their first."""
    keys, batch = jax.random.split(jax.random.key(0), 4), len(ends)
    shapes = (batch, 1, 4, 256), (batch, 1, 4, 16), (batch, SLOTS, 256), (batch, SLOTS, 16)
    drawn = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    values = [each.astype(dtype) for each in drawn]
    last = jnp.asarray(ends)[:, None] - 1
    positions = jnp.arange(SLOTS)[None] - (SLOTS - 1 - last)  # padded on the left
    return (*values, last, positions)


def reference(query: Any, turned: Any, latent: Any, rope_key: Any, at: Any, keys_at: Any) -> np.ndarray:
    """Softmax over all slots in float32."""
    query, turned, latent, rope_key = (each.astype(jnp.float32) for each in (query, turned, latent, rope_key))
    scores = jnp.einsum("bshr,bkr->bhsk", query, latent) + jnp.einsum("bshr,bkr->bhsk", turned, rope_key)
    seen = visibility(at, keys_at, AttentionSpec(4, 4, 48))[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores * 0.05, MASKED), axis=-1)
    return np.asarray(jnp.einsum("bhsk,bkr->bshr", shares, latent))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of 128 slots."""
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", 1)


def decoded(given: tuple[jax.Array, ...], slot: int = SLOTS - 1, context: AttentionContext = CONTEXT) -> jax.Array:
    """What the kernel gives for a cache whose token at `slot` is new, and has large numbers in its place before. It
    must leave the cache as it is with the token."""
    query, turned, latent, rope_key, *positions = given
    new = latent[:, slot : slot + 1], rope_key[:, slot : slot + 1]
    before = latent.at[:, slot].set(1e4), rope_key.at[:, slot].set(1e4)

    def run(*values: Any) -> Any:
        return latent_decode(*values, SPEC, context)

    mixed, *cache = jax.jit(run)(query, turned, *before, new, jnp.int32(slot), *positions)
    for ours, expected in zip(cache, (latent, rope_key), strict=True):
        np.testing.assert_array_equal(ours, expected)
    return mixed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_equals_the_reference(dtype: Any) -> None:
    given = arrays(dtype=dtype)
    ours, theirs = decoded(given), reference(*given)
    assert ours.dtype == dtype
    bound = 1e-5 if dtype == jnp.float32 else 2**-7
    assert np.abs(np.asarray(ours, np.float32) - theirs).max() <= bound * np.abs(theirs).max()


def test_rows_and_heads_may_be_divided() -> None:
    given = arrays((300, 1, 384, 77))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    context = replace(CONTEXT, mesh=mesh, batch_axes=("data",), head_axes=("tensor",))
    np.testing.assert_allclose(decoded(given, context=context), decoded(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slot", [0, 130, 299])
def test_the_token_may_be_anywhere(slot: int) -> None:
    """Slots behind it are not written yet, and have positions that its query does not see."""
    query, turned, latent, rope_key, _, keys_at = arrays((SLOTS,) * 3)
    given = query, turned, latent, rope_key, jnp.full((3, 1), slot), keys_at
    theirs = reference(*given)
    assert np.abs(decoded(given, slot) - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_blocks_that_a_row_does_not_see_do_not_count() -> None:
    query, turned, latent, rope_key, at, keys_at = arrays((100, 100))
    nowhere = latent.at[:, :128].set(jnp.nan), rope_key.at[:, :128].set(jnp.nan)  # before the first token
    seen = decoded((query, turned, latent, rope_key, at, keys_at))
    assert bool((decoded((query, turned, *nowhere, at, keys_at)) == seen).all())


@pytest.mark.parametrize(
    ("spec", "changes", "queries", "slots", "why"),
    [
        (SPEC, {}, 1, SLOTS, None),
        (SPEC, {}, 2, SLOTS, "one query"),
        (SPEC, {}, 1, 300, "not a multiple of 128"),
        (SPEC, {"of_stack": True}, 1, SLOTS, "would be copied"),
        (SPEC, {"sequence_axes": ("sequence",)}, 1, SLOTS, "whole cache"),
        (SPEC, {"platform": "gpu"}, 1, SLOTS, "TPUs"),
        (replace(SPEC, v_head_dim=96), {"platform": "tpu"}, 1, SLOTS, "96 features"),
        (replace(SPEC, head_dim=264), {"platform": "tpu"}, 1, SLOTS, "rotated keys 8"),
    ],
)
def test_what_it_does_not_serve(
    spec: AttentionSpec, changes: dict[str, Any], queries: int, slots: int, why: str | None
) -> None:
    found = serves(spec, replace(CONTEXT, **changes), queries, slots)
    assert found is None if why is None else found is not None and why in found
