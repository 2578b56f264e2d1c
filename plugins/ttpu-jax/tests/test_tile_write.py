"""The kernel that writes keys and values into split pages of 8 bits, in the interpreter, against the plain version."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh
from paged_cases import LATENTS, Ragged, TpuPlacement, ragged

from ttpu_core.spec import AlibiSpec, AttentionSpec, axes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import empty_pages, page_bytes, tile_write, write
from ttpu_jax.ops.paged_attention.layout import heads_of

PAGE = 64
ONE = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=128)
TWO = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80)
THREE = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=128, v_head_dim=96)
FOUR = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=128)
DECODE = ragged([1] * 6, [1, 32, 33, 64, 65, 130], page_size=PAGE, pages=4, sequences=8, tokens=8)
MIXED = ragged([1, 70, 1, 33, 3, 7, 200], [64, 75, 8, 64, 3, 39, 256], page_size=PAGE, pages=4, sequences=9, tokens=330)
"""Prompts that begin and end inside tiles, one that is whole tiles, and several in one tile of the batch."""
NOTHING = ragged([], [], page_size=PAGE, pages=4, sequences=2, tokens=2, max_queries=1)
CROWD = ragged([1] * 40, [3 + 5 * i for i in range(40)], page_size=PAGE, pages=4, sequences=44, tokens=44)
"""Of several steps of the grid."""
SHARED = ragged(
    [31, 1, 2, 34, 16, 5], [31, 50, 64, 97, 16, 70], page_size=32, pages=4, sequences=20, tokens=97
)
"""Parts of tiles, one of which lacks one token."""
TIGHT = ragged([2] * 12, [33] * 12, page_size=32, pages=4)
"""Two tiles for each sequence, and no padding."""
SPARSE = ragged([3, 0, 4], [33, 64, 10], page_size=PAGE, pages=4, sequences=6, tokens=7)
"""A sequence without tokens, and no padding."""
STRICT = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", out_of_bounds_reads="raise")
"""An interpreter of whole TPUs: copies end when they are waited for, and no earlier."""


FLOAT8, INT8 = jnp.float8_e4m3fn, jnp.int8


@pytest.mark.parametrize(
    ("case", "spec", "devices", "dtype"),
    [
        (DECODE, ONE, 1, FLOAT8),
        (DECODE, LATENTS, 1, FLOAT8),
        (DECODE, TWO, 2, FLOAT8),
        (MIXED, ONE, 1, FLOAT8),
        (MIXED, LATENTS, 1, FLOAT8),
        (MIXED, TWO, 2, FLOAT8),
        (MIXED, THREE, 1, FLOAT8),
        (NOTHING, ONE, 1, FLOAT8),
        (DECODE, LATENTS, 2, FLOAT8),
        (CROWD, ONE, 1, FLOAT8),
        (CROWD, THREE, 1, FLOAT8),
        (SHARED, ONE, 1, FLOAT8),
        (TIGHT, ONE, 1, FLOAT8),
        (SPARSE, ONE, 1, FLOAT8),
        (DECODE, LATENTS, 2, INT8),
        (MIXED, LATENTS, 1, INT8),
        (MIXED, TWO, 2, INT8),
        (CROWD, THREE, 1, INT8),
        (SHARED, THREE, 1, INT8),
        (DECODE, FOUR, 1, INT8),
        (MIXED, FOUR, 2, INT8),
    ],
)
def test_the_kernel_writes_the_bits_of_the_plain_version(
    case: Ragged, spec: AttentionSpec, devices: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The null page aside, into which only the plain version writes padding."""
    monkeypatch.setattr(tile_write, "BLOCK_BYTES", 2**17)  # of a few tiles
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",), axis_types=(AxisType.Auto,)) if devices > 1 else None
    placement, rng, in_key = TpuPlacement(mesh), np.random.default_rng(0), spec is LATENTS
    size, pages = case.batch.page_size, 1 + max(case.num_pages, 2)
    kv = empty_pages(spec, pages, size, placement, dtype, value_in_key=in_key)
    assert not kv.combined
    kv = jax.tree.map(lambda kept: jnp.asarray(3 * rng.standard_normal(kept.shape), kept.dtype), kv)
    key, value = (
        jnp.asarray(rng.standard_normal((case.tokens, spec.num_kv_heads, dim)), jnp.bfloat16)
        for dim in (spec.head_dim, spec.value_dim)
    )
    key = key.at[1].set(0)  # which int8 has a scale for too
    key = key.at[0, 0, 0].set(1000)  # more than float8 holds, which are NaN unless they are clipped
    value = None if in_key else value
    wanted = jax.jit(write)(kv, key, value, case.batch)
    context = AttentionContext(
        mesh=mesh, head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads), platform="tpu"
    )
    monkeypatch.setattr(tile_write, "write_tiles", partial(tile_write.write_tiles, interpret=STRICT))
    found = jax.jit(partial(write, context=context))(kv, key, value, case.batch)
    assert found.pages.dtype == wanted.pages.dtype
    assert np.isfinite(np.asarray(wanted.pages, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(found.pages[1:], np.float32), np.asarray(wanted.pages[1:], np.float32))
    assert (np.asarray(found.pages, np.float32) != np.asarray(kv.pages, np.float32)).any() == bool(case.real)
    if dtype == INT8:
        used, heads = 32 if in_key else 64, spec.num_kv_heads
        scales = (each.scales.reshape(*each.scales.shape[:2], heads, -1)[1:, ..., :used] for each in (found, wanted))
        np.testing.assert_allclose(*scales, rtol=1e-6)


def test_no_number_of_one_sequence_reaches_another_one() -> None:
    """Which shares the registers that new tokens are read in."""
    case = ragged([2, 3], [2, 3], page_size=PAGE, pages=1)
    kv = empty_pages(ONE, 4, PAGE, TpuPlacement(), jnp.float8_e4m3fn)
    key = jnp.ones((5, 1, 128), jnp.bfloat16).at[1].set(jnp.nan)
    context = AttentionContext(mesh=None, head_axes=(), platform="tpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_write, "write_tiles", partial(tile_write.write_tiles, interpret=True))
        found = jax.jit(partial(write, context=context))(kv, key, key, case.batch)
    pages = np.asarray(found.pages, np.float32)
    first, second = np.asarray(case.batch.tables[0])[:, 0]
    assert np.isnan(pages[first, :, 0, 1]).all()
    assert (pages[first, :, 0, 0] == 1).all()
    assert (pages[second, :, 0, :3] == 1).all()
    assert not pages[second, :, 0, 3:].any()


@pytest.mark.parametrize(
    ("spec", "page_size", "in_key", "devices", "features", "combined"),
    [
        (ONE, 32, False, 1, 2 * 128, False),
        (replace(ONE, alibi=AlibiSpec()), 32, False, 1, 2 * 128, False),
        (TWO, 32, False, 2, 2 * 2 * 128, False),
        (LATENTS, 32, True, 1, 3 * 128, False),
        (AttentionSpec(4, 2, 128), 32, False, 1, 2 * 2 * 128, True),  # no head of zeros is needed
        (AttentionSpec(4, 1, 256), 32, False, 1, 2 * 256, False),
        (AttentionSpec(24, 24, 256), 32, False, 1, 24 * 2 * 256, True),  # nor where heads are in two parts each
        (ONE, 16, False, 1, 2 * 2 * 128, True),  # half a tile
    ],
)
def test_pages_of_8_bits_hold_no_more_than_they_must(
    spec: AttentionSpec, page_size: int, in_key: bool, devices: int, features: int, combined: bool
) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",), axis_types=(AxisType.Auto,)) if devices > 1 else None
    placement = TpuPlacement(mesh)
    found = page_bytes(spec, page_size, placement, jnp.float8_e4m3fn, value_in_key=in_key)
    assert found == (page_size * features, devices)
    kv = empty_pages(spec, 2, page_size, placement, jnp.float8_e4m3fn, value_in_key=in_key)
    assert bool(kv.combined) == combined


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_kernel_is_given_no_float16(dtype: str) -> None:
    """Which TPUs cannot load."""
    kv = empty_pages(ONE, 2, 32, TpuPlacement(), jnp.float8_e4m3fn)
    key = jnp.ones((4, 1, 128), dtype)
    given = "bfloat16" if dtype == "bfloat16" else "float32"
    assert {one.dtype for one in heads_of(kv, key, key)} == {jnp.dtype(given)}
