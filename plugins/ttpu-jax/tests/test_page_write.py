"""The kernel that writes rows of keys and values into pages, in the interpreter, against the plain version."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paged_cases import Ragged, TpuPlacement, ragged

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import empty_pages, page_write, write, write_pairs

PAGE = 8
GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64)
WIDE = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=256, v_head_dim=192)
EVEN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=256)
DECODE = ragged([1, 1, 1, 1], [1, 8, 9, 30], page_size=PAGE, pages=8, sequences=6, tokens=6)
MIXED = ragged([1, 21, 1, 8, 3], [17, 33, 8, 8, 3], page_size=PAGE, pages=8, sequences=7, tokens=48)
NOTHING = ragged([], [], page_size=PAGE, pages=8, sequences=2, tokens=2, max_queries=1)


@pytest.mark.parametrize(
    ("case", "spec", "dtype", "devices"),
    [
        (DECODE, GQA, "bfloat16", 1),
        (DECODE, WIDE, "float32", 2),
        (MIXED, WIDE, "bfloat16", 1),
        (MIXED, EVEN, "bfloat16", 2),
        (MIXED, GQA, "float8_e4m3fn", 2),
        (MIXED, AttentionSpec(6, 3, 256), "bfloat16", 1),
        (NOTHING, GQA, "bfloat16", 1),
    ],
)
def test_the_kernel_writes_the_bits_of_the_plain_version(
    case: Ragged, spec: AttentionSpec, dtype: Any, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The null page aside, into which only the plain version writes padding."""
    monkeypatch.setattr(page_write, "BLOCK_BYTES", 2**14)  # of a few tokens, so that runs go over the end of a block
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",), axis_types=(AxisType.Auto,)) if devices > 1 else None
    placement = TpuPlacement(mesh)
    rng = np.random.default_rng(0)
    pages = 1 + max(case.num_pages, 2)
    kv = empty_pages(spec, pages, PAGE, placement, jnp.dtype(dtype))
    kv = replace(kv, pages=jnp.asarray(rng.standard_normal(kv.pages.shape), kv.pages.dtype))
    key, value = (
        jnp.asarray(rng.standard_normal((case.tokens, spec.num_kv_heads, dim)), jnp.bfloat16)
        for dim in (spec.head_dim, spec.value_dim)
    )
    key = key.at[0, 0, 0].set(1000)  # more than 8 bits hold, which are NaN unless they are clipped
    wanted = jax.jit(write)(kv, key, value, case.batch)
    context = AttentionContext(
        mesh=mesh, head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads), platform="tpu"
    )
    for name in ("write_rows", "write_heads"):
        monkeypatch.setattr(page_write, name, partial(getattr(page_write, name), interpret=True))
    found = []
    for outside in (False, True):
        found.append(jax.jit(partial(write, context=context, heads_outside=outside))(kv, key, value, case.batch))
        if key.shape == value.shape:
            of_pairs = jax.jit(partial(write_pairs, context=context, heads_outside=outside))
            found.append(of_pairs(kv, jnp.stack([key, value], axis=2), case.batch))
    assert np.isfinite(np.asarray(wanted.pages, np.float32)).all()
    for one in found:
        assert one.pages.dtype == wanted.pages.dtype
        np.testing.assert_array_equal(
            np.asarray(one.pages[1:], np.float32), np.asarray(wanted.pages[1:], np.float32)
        )
    if case.real:
        assert (np.asarray(found[0].pages, np.float32) != np.asarray(kv.pages, np.float32)).any()
