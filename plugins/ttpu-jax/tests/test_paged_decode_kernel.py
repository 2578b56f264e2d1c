"""Our kernel for served steps of one query or a few of each sequence, in the interpreter, against the plain version
over the same pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paged_cases import (
    IN_SPLIT_PAGES,
    LATENTS,
    Ragged,
    TpuPlacement,
    assert_as_near_as_bfloat16,
    assert_split_pages_are_read,
    assert_two_devices_share_heads,
    kernel_and_reference,
    oracle,
    ragged,
    rounded_numbers,
    tpu_pages,
)

from ttpu_core.spec import AlibiSpec, AttentionSpec, axes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import (
    api,
    decode_kernel,
    empty_pages,
    limits,
    page_bytes,
    paged_attention,
)
from ttpu_jax.ops.paged_attention.digits import WITHOUT_INTEGERS, Rows
from ttpu_jax.ops.paged_attention.pieces import pieces_of

PAGE = 16
GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64)
WIDE = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256)
LENGTHS = [1, PAGE, PAGE + 1, 37, 6 * PAGE, 5 * PAGE + 3]
"""One token, a whole page, one more than that, and one or two blocks of three pages."""


def step(counts: list[int] | None = None, lengths: list[int] = LENGTHS, window: int | None = None) -> Ragged:
    """A step with room for two more sequences. Without `counts` each sequence has one query."""
    most, rows = max(counts or [1]), len(lengths) + 2
    return ragged(
        counts or [1] * len(lengths), lengths, page_size=PAGE, pages=6, sequences=rows, tokens=rows * most,
        window=window, max_queries=most,
    )  # fmt: skip


CASES = {
    "groups of query heads": (GQA, step()),
    "one head of 256": (WIDE, step()),
    "three heads of 256": (AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=256), step()),
    "heads of 512, narrower values": (AttentionSpec(2, 1, 512, v_head_dim=320), step()),
    "heads of 128, values of 96": (AttentionSpec(3, 1, 128, v_head_dim=96), step()),
    "window": (replace(WIDE, window=35), step(window=35)),
    "window of one page": (replace(GQA, window=PAGE), step(window=PAGE)),
    "chunk": (replace(GQA, chunk=2 * PAGE), step()),
    "softcap, scale": (replace(WIDE, logit_softcap=3.0, scale=0.3), step()),
    "sinks": (replace(GQA, sinks=True), step()),
    "sinks, softcap and a window": (replace(WIDE, sinks=True, logit_softcap=3.0, window=5), step(window=5)),
    "drafts": (GQA, step([1, 3, 4, 2, 4, 1])),
    "drafts, window and sinks": (replace(WIDE, window=20, sinks=True), step([1, 3, 4, 2, 4, 1], window=20)),
    "no sequence": (GQA, step([], [])),
    "seven sequences of one head": (AttentionSpec(2, 1, 64), ragged([1] * 7, [*LENGTHS, 20], page_size=PAGE, pages=6)),
    "more rows than are computed together": (
        AttentionSpec(288, 1, 64), ragged([1] * 3, [9, 70, 90], page_size=PAGE, pages=6)
    ),
    "latents": (LATENTS, step()),
    "latents, drafts": (LATENTS, step([1, 3, 4, 2, 4, 1])),
}


def both(spec: AttentionSpec, case: Ragged, dtype: Any = jnp.float32, kind: str = "") -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the reference's."""
    assert limits.unserved_step(spec, case.batch, case.tokens) is None
    return kernel_and_reference(decode_kernel.attend, spec, case, dtype, kind)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four pages, and one page of them where a sequence ends."""
    monkeypatch.setattr(decode_kernel, "BLOCK_TOKENS", 4 * PAGE)


@pytest.mark.parametrize(("spec", "case"), CASES.values(), ids=CASES)
def test_the_kernel_equals_the_reference(spec: AttentionSpec, case: Ragged) -> None:
    found, wanted = both(spec, case)
    assert np.abs(found[: case.real] - wanted[: case.real]).max(initial=0) <= 1e-5
    assert not found[case.real :].any(), "padding tokens have zeros"


def test_two_cores_share_the_sequences() -> None:
    """Each begins with copies of its own; the second one has an absent sequence among its own."""
    spec, case = CASES["window"]
    found, wanted = both(spec, case, kind="TPU v4")
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 1e-5


@pytest.mark.parametrize("name", ["three heads of 256", "sinks", "drafts", "latents"])
def test_in_bfloat16_it_is_as_near_as_bfloat16_is(name: str) -> None:
    """Keys and values are then halves of one register."""
    assert_as_near_as_bfloat16(decode_kernel.attend, *CASES[name])


@pytest.mark.parametrize("name", ["groups of query heads", "three heads of 256", "sinks"])
def test_pages_of_8_bits_are_read_as_they_are(name: str) -> None:
    """Four rows of keys and values are then one register."""
    spec, case = CASES[name]
    found, wanted = both(spec, case, jnp.float8_e4m3fn)
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 2**-6 * np.abs(wanted[: case.real]).max()


@pytest.mark.parametrize("name", IN_SPLIT_PAGES)
def test_split_pages_have_each_heads_tokens_together(name: str) -> None:
    assert_split_pages_are_read(decode_kernel.attend, name, [1] * 6, [1, 32, 33, 70, 160, 150])


@pytest.mark.parametrize("name", ["int8, one head", "int8, three heads"])
def test_scales_of_several_tiles_come_in_the_order_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five sequences, computed together; blocks have whole rows of scales, and some tiles more."""
    monkeypatch.setattr(decode_kernel, "BLOCK_TOKENS", 448)
    assert_split_pages_are_read(decode_kernel.attend, name, [1] * 5, [1, 100, 500, 449, 330], page_size=64)


def test_many_small_shares_count_beside_a_large_one() -> None:
    """Half of all goes to the first token, and each other one has a 4096th of its share."""
    spec, tokens = AttentionSpec(1, 1, 128, scale=1.0), 4096
    case = ragged([1], [tokens], page_size=64, pages=tokens // 64)
    query = np.zeros((1, 1, 1, 128), np.float32)
    query[..., 0] = 1
    keys = np.zeros((tokens, 1, 128), np.float32)
    keys[0, 0, 0] = np.log(tokens)
    values = np.ones((tokens, 1, 128), np.float32)
    values[0] = 0
    kv = tpu_pages(case, spec, keys, values, jnp.int8)
    found = decode_kernel.attend(jnp.asarray(query), kv, case.batch, spec, "", interpret=True)
    assert np.asarray(found) == pytest.approx(0.5, rel=0.02)


def test_integers_of_digits_are_as_exact_as_they_say() -> None:
    rng = np.random.default_rng(0)
    x, other = rng.standard_normal((3, 256)).astype(np.float32), rng.integers(-127, 128, (64, 256), np.int8)
    x[1] = 0
    largest, exact = np.abs(x).max(1, keepdims=True), x.astype(np.float64) @ other.T
    off = np.abs(other.astype(np.float64)).sum(1)
    for count, share in ((2, 32512), (3, 4161536)):
        found = Rows(jnp.asarray(x), count).by_features([jnp.asarray(other[:, :128]), jnp.asarray(other[:, 128:])])
        assert (np.abs(np.asarray(found) - exact) <= largest / share * off + 2e-6 * np.abs(x) @ np.abs(other.T)).all()
    weights = np.abs(x[:, :64])
    rows = Rows(jnp.asarray(weights), 3, jnp.full((3, 1), 4.0)).by_rows([jnp.asarray(other)])
    assert np.abs(np.asarray(rows) - weights.astype(np.float64) @ other).max() <= 4 / 4161536 * 127 * 64 + 1e-3


@pytest.mark.parametrize("kind", WITHOUT_INTEGERS)
def test_chips_that_multiply_no_integers_convert_them(kind: str) -> None:
    assert_split_pages_are_read(decode_kernel.attend, "int8, four heads, softcap", [1] * 3, [1, 70, 150], kind)


def test_the_scales_of_several_devices_are_those_of_their_heads() -> None:
    """Two heads each, whose scales are neighbours."""
    spec, case = AttentionSpec(8, 4, 256), ragged([1, 3], [40, 33], page_size=32, pages=2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    placement = TpuPlacement(mesh)
    query, keys, values, _ = rounded_numbers(case, spec)
    alone = tpu_pages(case, spec, keys, values, jnp.int8)
    shared = tpu_pages(case, spec, keys, values, jnp.int8, placement)
    assert shared.scales is not None and shared.scales.sharding.shard_shape(shared.scales.shape)[3] == 128
    found = [
        jax.jit(lambda kv, context=context: paged_attention(jnp.asarray(query), kv, case.batch, spec, context=context))(
            kv
        )
        for kv, context in (
            (alone, AttentionContext(platform="gpu")),
            (shared, AttentionContext(mesh=mesh, head_axes=placement.mesh_axes(axes.KV_HEADS, 4), platform="gpu")),
        )
    ]
    np.testing.assert_allclose(np.asarray(found[1]), np.asarray(found[0]), atol=2e-6, rtol=0)


def test_the_pages_of_wide_heads_are_split_and_hold_each_devices_heads() -> None:
    spec, case = AttentionSpec(4, 2, 256), step()
    kv = assert_two_devices_share_heads(decode_kernel.attend, spec, case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    assert kv.pages.shape == (case.num_pages, PAGE, 2 * 2 * 2, 128)
    assert page_bytes(spec, PAGE, TpuPlacement(mesh), jnp.float32) == (PAGE * 4 * 256 * 4, 2)
    _, keys, values, _ = rounded_numbers(case, spec)
    first = np.asarray(kv.pages)[np.asarray(case.batch.tables[0])[0, 0], 0].reshape(2, 2, 2, 128)  # device, part, plane
    np.testing.assert_array_equal(first[:, :, 0].reshape(2, 256), keys[0])
    np.testing.assert_array_equal(first[:, :, 1].reshape(2, 256), values[0])


def test_devices_that_do_not_share_the_heads_hold_all_rows() -> None:
    """The rows of three heads, and of keys and values of one, would divide."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    for spec in (AttentionSpec(6, 3, 64), AttentionSpec(4, 1, 256)):
        for dtype in (jnp.bfloat16, jnp.int8):
            kv = empty_pages(spec, 4, 32, TpuPlacement(mesh), dtype)
            assert all(array.sharding.is_fully_replicated for array in jax.tree.leaves(kv))


@pytest.mark.parametrize(
    ("spec", "dtype", "in_key", "reason"),
    [
        (WIDE, "bfloat16", False, None),
        (WIDE, "float32", False, None),
        (WIDE, "int8", False, None),
        (WIDE, "float8_e4m3fn", False, None),
        (WIDE, "float16", False, "do not read float16"),
        (AttentionSpec(16, 1, 576, v_head_dim=512), "bfloat16", True, None),
        (AttentionSpec(16, 1, 576, v_head_dim=512), "float8_e4m3fn", True, None),
        (AttentionSpec(16, 1, 576, v_head_dim=512), "int8", True, None),
        (AttentionSpec(16, 1, 384), "bfloat16", False, "heads of 384 features"),
        (AttentionSpec(16, 1, 384), "int8", False, None),
        (replace(GQA, alibi=AlibiSpec()), "bfloat16", False, "ALiBi"),
    ],
)
def test_layers_that_it_does_not_serve(spec: AttentionSpec, dtype: str, in_key: bool, reason: str | None) -> None:
    found = api.serves_own(spec, "tpu", jnp.dtype(dtype), value_in_key=in_key)
    assert (found is None) if reason is None else (reason in str(found))
    assert "for TPUs" in str(api.serves_own(spec, "gpu", jnp.dtype(dtype), value_in_key=in_key))


@pytest.mark.parametrize(
    ("spec", "dtype", "page_size", "reason"),
    [
        (LATENTS, "float8_e4m3fn", 32, None),
        (LATENTS, "float8_e4m3fn", 16, "must have a multiple of 32 tokens"),
        (GQA, "int8", 16, "must have a multiple of 32 tokens"),
        (LATENTS, "int8", 32, None),
        (LATENTS, "int8", 16, "must have a multiple of 32 tokens"),
        (GQA, "int8", 32, None),
        (AttentionSpec(4, 1, 64), "int8", 32, None),
        (AttentionSpec(6, 3, 64), "int8", 32, None),
        (AttentionSpec(4, 1, 384), "int8", 32, None),
        (AttentionSpec(4, 1, 384), "bfloat16", 32, "not split into parts of 128"),
        (AttentionSpec(8, 8, 384), "float8_e4m3fn", 32, "not split into parts of 128"),
    ],
)
def test_pages_that_it_does_not_read(spec: AttentionSpec, dtype: str, page_size: int, reason: str | None) -> None:
    kv = empty_pages(spec, 4, page_size, TpuPlacement(), jnp.dtype(dtype), value_in_key=spec == LATENTS)
    found = limits.unserved_pages(kv)
    assert (found is None) if reason is None else (reason in str(found))


@pytest.mark.parametrize(("dtype", "cycles"), [("bfloat16", 0), ("int8", 0), ("float8_e4m3fn", 3)])
def test_the_kernel_states_what_converting_float8_takes(dtype: str, cycles: int) -> None:
    """For each number of the pages; beside it an exponential for each query and key."""
    case = step()
    kv = empty_pages(GQA, case.num_pages, 32, TpuPlacement(), jnp.dtype(dtype))
    queries = jnp.zeros((len(case.batch.kv_lens), 2, 2, 128))
    pieces = pieces_of(GQA, case.batch, 0)
    stated = decode_kernel.cost_of_singles(queries, kv, pieces, GQA).transcendentals
    assert stated == case.num_pages * 32 * 4 + cycles * kv.pages.size


def test_int8_pages_of_half_a_tile_hold_the_same() -> None:
    """Which the plain version reads, and which lie as those of wider numbers do."""
    spec, case = AttentionSpec(4, 2, 256), step()
    query, keys, values, _ = rounded_numbers(case, spec)
    kv = tpu_pages(case, spec, keys, values, jnp.int8)
    assert kv.combined and limits.unserved_pages(kv) is not None
    context = AttentionContext(platform="gpu")
    found = paged_attention(jnp.asarray(query), kv, case.batch, spec, context=context)
    exact = oracle(case.counts, case.lengths, query, keys, values, spec)
    assert np.abs(np.asarray(found)[: case.real] - exact).max() < 0.03


def test_steps_that_it_does_not_serve() -> None:
    drafts = step([4, 1, 4], [9, 22, 61])
    assert limits.unserved_step(GQA, drafts.batch, drafts.tokens) is None
    assert "several chunks" in str(limits.unserved_step(replace(GQA, chunk=32), drafts.batch, drafts.tokens))
    mixed = ragged([17, 1], [17, 20], page_size=PAGE, pages=6, tokens=34)
    assert "at most 16 queries" in str(limits.unserved_step(GQA, mixed.batch, mixed.tokens))
    assert "with room for" in str(limits.unserved_step(GQA, step().batch, 64))
