"""The kernels for int8 pages, in the interpreter, against the plain version over the same pages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paged_cases import Ragged, TpuPlacement, oracle, ragged, whole

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import (
    PagedKV,
    empty_pages,
    int8_blocks,
    int8_kernel,
    int8_write,
    paged_attention,
    write,
)
from ttpu_jax.ops.paged_attention.reference import reference
from ttpu_jax.params.placement import Placement

PAGE = 32


def drawn(seed: int, *, decode: bool = False, window: int | None = None) -> Ragged:
    """A batch of sequences that have one token, end on a page's last or first token, or are of any length."""
    rng = np.random.default_rng(seed)
    lengths = [1, PAGE, PAGE + 1, *rng.integers(2, 4 * PAGE, 3).tolist()]
    counts = [1 if decode or i % 2 == 0 else int(rng.integers(1, length + 1)) for i, length in enumerate(lengths)]
    tokens = len(lengths) + 2 if decode else sum(counts) + 7
    return ragged(
        counts, lengths, page_size=PAGE, pages=4, sequences=len(lengths) + 2, tokens=tokens, window=window, seed=seed
    )


def numbers(case: Ragged, spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries of the batch, keys and values of all tokens, sinks."""
    rng = np.random.default_rng(0)
    heads, total = spec.num_kv_heads, sum(case.lengths)
    query = rng.standard_normal((case.tokens, heads, spec.q_per_kv, spec.head_dim), np.float32)
    keys = rng.standard_normal((total, heads, spec.head_dim), np.float32)
    values = rng.standard_normal((total, heads, spec.value_dim), np.float32)
    return query, keys, values, rng.standard_normal((heads, spec.q_per_kv), np.float32)


def filled(case: Ragged, spec: AttentionSpec, keys: Any, values: Any, placement: Placement | None = None) -> PagedKV:
    kv = empty_pages(spec, case.num_pages, PAGE, placement or TpuPlacement(), jnp.int8)
    return jax.jit(write)(kv, jnp.asarray(keys), jnp.asarray(values), whole(case).batch)


@pytest.mark.parametrize(
    ("case", "spec", "digits"),
    [
        (drawn(1, decode=True), AttentionSpec(8, 2, 128), True),
        (drawn(2, window=40), AttentionSpec(8, 4, 64, window=40, logit_softcap=3.0, sinks=True), True),
        (drawn(3), AttentionSpec(6, 2, 256, v_head_dim=192, chunk=64), False),
    ],
    ids=["decode", "window, softcap, sinks, four heads", "chunk, 256 features, no integers"],
)
def test_the_kernels_give_what_the_plain_version_gives(
    case: Ragged, spec: AttentionSpec, digits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"single_keys": 2 * PAGE, "block_keys": (1 + digits) * PAGE}
    small = {**int8_blocks._data()["default"], **sizes, "digits": digits}
    monkeypatch.setattr(int8_blocks, "_data", lambda: {"default": {**small, "block_rows": 32, "single_queries": 3}})
    query, keys, values, sinks = numbers(case, spec)
    sink = jnp.asarray(sinks) if spec.sinks else None
    kv = filled(case, spec, keys, values)
    assert kv.scales is not None
    # What a page's last owner left behind a sequence's end, and what nobody owns, may be anything.
    table, scales = np.asarray(case.batch.tables[0]), np.array(kv.scales)
    for row, length in enumerate(case.lengths):
        scales[table[row, (length - 1) // PAGE], :, 4 * ((length - 1) % PAGE + 1) :] = np.nan
    poisoned = replace(kv, scales=jnp.asarray(scales))
    run = jax.jit(lambda query, kv, batch: int8_kernel.attend(query, kv, batch, spec, "", sinks=sink, interpret=True))
    found = np.asarray(run(jnp.asarray(query), poisoned, case.batch))
    wanted = np.asarray(reference(jnp.asarray(query), kv, case.batch, spec, sinks=sink, platform="gpu"))
    # Probabilities are off by 1/32512 as integers, and by 1/512 in bfloat16, as scores are.
    np.testing.assert_allclose(found[: case.real], wanted[: case.real], atol=5e-4 if digits else 0.02, rtol=0)
    assert np.isfinite(found).all(), "padding tokens must stay numbers"
    exact = oracle(case.counts, case.lengths, query, keys, values, spec, sinks if spec.sinks else None)
    assert np.abs(found[: case.real] - exact).max() < 0.03


def test_paired_pages_of_several_devices_hold_each_devices_heads() -> None:
    spec, case = AttentionSpec(8, 4, 256), drawn(4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    placement = TpuPlacement(mesh)
    query, keys, values, _ = numbers(case, spec)
    alone, shared = filled(case, spec, keys, values), filled(case, spec, keys, values, placement)
    heads = placement.mesh_axes(axes.KV_HEADS, 4)
    assert shared.scales is not None and shared.scales.sharding.shard_shape(shared.scales.shape)[1] == 1
    found = [
        jax.jit(lambda kv, context=context: paged_attention(jnp.asarray(query), kv, case.batch, spec, context=context))(
            kv
        )
        for kv, context in (
            (alone, AttentionContext(platform="gpu")),
            (shared, AttentionContext(mesh=mesh, head_axes=heads, platform="gpu")),
        )
    ]
    np.testing.assert_allclose(np.asarray(found[1])[: case.real], np.asarray(found[0])[: case.real], atol=2e-6, rtol=0)


def written(kv: PagedKV, case: Ragged, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pages and scales of `kv` with the real tokens of a step, key by key."""
    pages, scales = np.array(kv.pages), np.array(kv.scales)
    devices, heads = kv.combined, keys.shape[1]
    rows, entries = pages.shape[2] // devices, scales.shape[1] // devices
    pairs = entries // (PAGE // 32)
    halves = rows // pairs // 4
    for token, slot in enumerate(np.asarray(case.batch.slots[0])[: case.real]):
        page, offset = divmod(int(slot), PAGE)
        for device in range(devices):
            for local in range(2 * pairs):
                head = device * heads // devices + local
                for plane, x in enumerate((keys, values)):
                    row = np.zeros(halves * 128, np.float32)
                    row[: x.shape[2]] = x[token, head].astype(np.float32)
                    scale = np.maximum(np.abs(row).max(), np.float32(1e-30)) / np.float32(127)
                    scale = scale.astype(jnp.bfloat16).astype(np.float32)
                    entry = 2 * (local % 2) + plane
                    for half in range(halves):
                        place = device * rows + half * pairs * 4 + local // 2 * 4 + entry
                        pages[page, offset, place] = np.round(row[half * 128 : (half + 1) * 128] / scale)
                    place = device * entries + local // 2 * (PAGE // 32) + offset // 32
                    scales[page, place, 4 * (offset % 32) + entry] = scale
    return pages, scales


@pytest.mark.parametrize(
    ("case", "spec", "dtype", "devices"),
    [
        (drawn(5, decode=True), AttentionSpec(8, 4, 256, v_head_dim=192), jnp.float32, 1),
        (drawn(6, window=40), AttentionSpec(4, 2, 64, window=40), jnp.bfloat16, 1),
        (drawn(7), AttentionSpec(16, 16, 128), jnp.bfloat16, 8),
    ],
    ids=["decode, 256 features, four heads", "window, chunked prefill", "8 devices"],
)
def test_the_kernel_that_writes_gives_the_bits_of_the_plain_version(
    case: Ragged, spec: AttentionSpec, dtype: Any, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the grid end within pages, the last is not whole, and padding follows the real tokens."""
    monkeypatch.setattr(int8_write, "MOST_TOKENS", 48)
    monkeypatch.setattr(int8_write, "write", partial(int8_write.write, interpret=True))
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",), axis_types=(AxisType.Auto,)) if devices > 1 else None
    placement = TpuPlacement(mesh)
    heads = placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads) if mesh else ()
    rng = np.random.default_rng(0)
    kv = empty_pages(spec, case.num_pages, PAGE, placement, jnp.int8)
    assert kv.scales is not None
    before = rng.random(kv.scales.shape, np.float32).astype(jnp.bfloat16).astype(np.float32)
    kv = replace(
        kv,
        pages=jax.device_put(rng.integers(-127, 128, kv.pages.shape, np.int8), kv.pages.sharding),
        scales=jax.device_put(before, kv.scales.sharding),
    )
    shape = case.tokens, spec.num_kv_heads
    keys = rng.standard_normal((*shape, spec.head_dim), np.float32).astype(dtype)
    values = rng.standard_normal((*shape, spec.value_dim), np.float32).astype(dtype)
    keys[0] = 0
    found, plain = (
        jax.jit(partial(write, context=AttentionContext(mesh=mesh, head_axes=heads, platform=platform)))(
            kv, jnp.asarray(keys), jnp.asarray(values), case.batch
        )
        for platform in ("tpu", "gpu")
    )
    pages, scales = written(kv, case, keys, values)
    for mine, theirs in ((found.pages, plain.pages), (found.scales, plain.scales)):
        np.testing.assert_array_equal(np.asarray(mine)[1:], np.asarray(theirs)[1:])
    # A number halfway between two integers may come out as either: XLA does not divide as numpy does.
    off = np.abs(np.asarray(found.pages).astype(int) - pages)
    assert off.max() <= 1 and off.sum() < 20 and not off[0].any(), "the null page is as it was"
    np.testing.assert_array_equal(np.asarray(found.scales), scales)
