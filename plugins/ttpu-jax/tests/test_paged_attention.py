"""Attention over pages: numbers against an oracle for every knob of a layer, for decode, prefill and mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from paged_cases import Ragged, oracle, ragged, whole

from ttpu_core.spec import AlibiSpec, AttentionSpec, axes
from ttpu_jax.aot.hlo import collectives
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import (
    NULL_PAGE,
    PagedKV,
    api,
    empty_pages,
    kernel,
    page_bytes,
    paged_attention,
    serves,
    write,
)
from ttpu_jax.ops.paged_attention.blocks import kernel_blocks
from ttpu_jax.params.placement import Placement

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
ONE_DEVICE = AttentionContext()

DECODE = ragged([1, 1, 1], [7, 1, 30], sequences=5, tokens=6)
PREFILL = ragged([9, 40, 1], [9, 40, 1], tokens=64)
MIXED = ragged([1, 1, 1, 6, 37], [13, 64, 5, 6, 50], sequences=8, tokens=64)
DRAFTS = ragged([3, 1, 4, 2], [9, 22, 4, 61], sequences=6, tokens=16, max_queries=4, max_prefills=6)
DRAFTS_AND_PREFILL = ragged([3, 1, 4, 33], [9, 22, 4, 45], sequences=6, tokens=64, max_prefills=6)
CASES = {
    "decode": DECODE, "prefill": PREFILL, "mixed": MIXED, "drafts": DRAFTS, "drafts and prefill": DRAFTS_AND_PREFILL
}  # fmt: skip


def numbers(case: Ragged, spec: AttentionSpec, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries of the batch, keys and values of all tokens of its sequences, sinks."""
    rng = np.random.default_rng(seed)
    heads, total = spec.num_kv_heads, sum(case.lengths)
    query = rng.standard_normal((case.tokens, heads, spec.q_per_kv, spec.head_dim), np.float32)
    keys = rng.standard_normal((total, heads, spec.head_dim), np.float32)
    values = rng.standard_normal((total, heads, spec.value_dim), np.float32)
    return query, keys, values, rng.standard_normal((heads, spec.q_per_kv), np.float32)


def filled(case: Ragged, spec: AttentionSpec, keys: Any, values: Any, **options: Any) -> PagedKV:
    """Pages into which `write` has put all tokens."""
    options = {"placement": Placement(), "dtype": jnp.float32, **options}
    kv = empty_pages(spec, case.num_pages, case.batch.page_size, **options)
    return jax.jit(write)(kv, jnp.asarray(keys), None if values is None else jnp.asarray(values), whole(case).batch)


def attended(case: Ragged, spec: AttentionSpec, query: Any, kv: PagedKV, sinks: Any = None, **options: Any) -> Any:
    context = AttentionContext(**options)
    run = jax.jit(lambda query, kv, batch: paged_attention(query, kv, batch, spec, sinks=sinks, context=context))
    return np.asarray(run(jnp.asarray(query), kv, case.batch))


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        *(pytest.param(case, GQA, id=name) for name, case in CASES.items()),
        pytest.param(MIXED, replace(GQA, num_kv_heads=4, v_head_dim=4, scale=0.3), id="mixed, value_dim"),
        pytest.param(MIXED, replace(GQA, chunk=8, sinks=True), id="mixed, chunk and sinks"),
        pytest.param(DECODE, replace(GQA, chunk=8, sinks=True), id="decode, chunk and sinks"),
        pytest.param(MIXED, replace(GQA, alibi=AlibiSpec()), id="mixed, ALiBi"),
        pytest.param(MIXED, replace(GQA, alibi=AlibiSpec(scaled=True, bfloat16=True)), id="mixed, falcon's ALiBi"),
        pytest.param(DRAFTS_AND_PREFILL, replace(GQA, logit_softcap=2.0, window=9), id="drafts, softcap and window"),
    ],
)
def test_every_knob_gives_what_the_oracle_gives(case: Ragged, spec: AttentionSpec) -> None:
    query, keys, values, sinks = numbers(case, spec)
    kv = filled(case, spec, keys, values)
    found = attended(case, spec, query, kv, sinks if spec.sinks else None)
    wanted = oracle(case.counts, case.lengths, query, keys, values, spec, sinks if spec.sinks else None)
    np.testing.assert_allclose(found[: case.real], wanted, atol=2e-6, rtol=0)
    assert np.isfinite(found).all(), "padding tokens must stay numbers"


@pytest.mark.parametrize("case", [MIXED, DRAFTS, DRAFTS_AND_PREFILL], ids=["mixed", "drafts", "drafts and prefill"])
def test_all_sequences_together_give_what_they_give_one_by_one(case: Ragged) -> None:
    """The order of other platforms than CPUs."""
    spec = replace(GQA, window=11, logit_softcap=5.0)
    query, keys, values, sinks = numbers(case, spec)
    found = attended(case, spec, query, filled(case, spec, keys, values), sinks, platform="gpu")
    wanted = oracle(case.counts, case.lengths, query, keys, values, spec, sinks)
    np.testing.assert_allclose(found[: case.real], wanted, atol=2e-6, rtol=0)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_lies_behind_a_window_or_past_the_end_does_not_matter(platform: str) -> None:
    spec = replace(GQA, window=9)
    case = ragged([1, 1, 20], [60, 30, 45], sequences=4, tokens=24, window=9)
    query, keys, values, _ = numbers(case, spec)
    kv = filled(case, spec, keys, values)
    table, size = np.asarray(case.batch.tables[0]), case.batch.page_size
    assert table[0, 0] == NULL_PAGE, "the case must give pages back"
    pages = np.array(kv.pages)
    pages[NULL_PAGE] = np.nan
    for row, length in enumerate(case.lengths):  # after its last token lies what a page's last owner left
        pages[table[row, (length - 1) // size], :, :, (length - 1) % size + 1 :] = np.nan
    found = attended(case, spec, query, replace(kv, pages=jnp.asarray(pages)), platform=platform)
    wanted = oracle(case.counts, case.lengths, query, keys, values, spec)
    np.testing.assert_allclose(found[: case.real], wanted, atol=2e-6, rtol=0)
    assert np.isfinite(found).all()


def test_a_sequence_gives_the_same_bits_alone_and_in_any_batch() -> None:
    query, keys, values, _ = numbers(DECODE, GQA)
    together = attended(DECODE, GQA, query, filled(DECODE, GQA, keys, values))
    alone = ragged([1], [30], seed=1)
    kv = filled(alone, GQA, keys[8:], values[8:])
    np.testing.assert_array_equal(attended(alone, GQA, query[2:3], kv)[0], together[2])


def test_values_can_be_the_first_features_of_the_keys() -> None:
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=12, v_head_dim=8, scale=0.2)
    query, keys, _, _ = numbers(MIXED, spec)
    kv = filled(MIXED, spec, keys, None, value_in_key=True)
    assert kv.pages.size == MIXED.num_pages * MIXED.batch.page_size * 12
    found = attended(MIXED, spec, query, kv)
    wanted = oracle(MIXED.counts, MIXED.lengths, query, keys, keys, spec)
    np.testing.assert_allclose(found[: MIXED.real], wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("case", [MIXED, DECODE], ids=["mixed", "decode"])
def test_devices_share_the_queries_of_latents(case: Ragged) -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=1, head_dim=12, v_head_dim=8, scale=0.2)
    query, keys, _, _ = numbers(case, spec)
    kv = filled(case, spec, keys, None, value_in_key=True)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    kv = jax.device_put(kv, NamedSharding(mesh, PartitionSpec()))
    query = jax.device_put(query, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
    found = attended(case, spec, query, kv, mesh=mesh, query_axes=("tensor",))
    wanted = oracle(case.counts, case.lengths, np.asarray(query), keys, keys, spec)
    np.testing.assert_allclose(found[: case.real], wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.02), ("float8_e4m3fn", 0.15)])
def test_quantized_pages_are_close(dtype: str, error: float) -> None:
    query, keys, values, _ = numbers(MIXED, GQA)
    kv = filled(MIXED, GQA, keys, values, dtype=jnp.dtype(dtype))
    assert kv.pages.dtype == dtype
    found = attended(MIXED, GQA, query, kv)[: MIXED.real]
    wanted = oracle(MIXED.counts, MIXED.lengths, query, keys, values, GQA)
    # int8 rounds by 1/254 of a head's largest number, float8 by 1/16 of each number; softmax averages over keys.
    assert np.abs(found - wanted).max() < error
    big = filled(MIXED, GQA, 1e4 * keys, values, dtype=jnp.dtype(dtype))
    assert np.isfinite(attended(MIXED, GQA, query, big)).all(), "what is too large for the type must not become NaN"


def test_on_a_cpu_16_bit_floats_are_kept_as_what_xla_can_index() -> None:
    kept = {name: empty_pages(GQA, 3, 4, Placement(), jnp.dtype(name)).pages for name in ("bfloat16", "float16")}
    assert {name: pages.dtype for name, pages in kept.items()} == {"bfloat16": jnp.uint16, "float16": jnp.float32}
    for name, pages in kept.items():
        assert page_bytes(GQA, 4, Placement(), jnp.dtype(name)) == (pages.nbytes // 3, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_pages_hold_the_very_numbers(dtype: str) -> None:
    query, keys, values, _ = numbers(MIXED, GQA)
    keys, values = (np.asarray(jnp.asarray(x, dtype)).astype(np.float32) for x in (keys, values))
    found = attended(MIXED, GQA, query, filled(MIXED, GQA, keys, values, dtype=jnp.dtype(dtype)))
    np.testing.assert_array_equal(found, attended(MIXED, GQA, query, filled(MIXED, GQA, keys, values)))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (replace(GQA, num_heads=16, num_kv_heads=8), "int8"),
        (replace(GQA, num_heads=16, num_kv_heads=8, alibi=AlibiSpec()), "float32"),
        (GQA, "float32"),
    ],
    ids=["8 heads", "8 heads with ALiBi", "2 heads"],
)
def test_on_eight_devices_each_has_its_heads_and_asks_no_other(spec: AttentionSpec, dtype: str) -> None:
    """Two heads do not divide: then every device has all of them."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",), axis_types=(AxisType.Auto,))
    placement = Placement(mesh)
    ways = 8 if spec.num_kv_heads == 8 else 1
    query, keys, values, sinks = numbers(MIXED, spec)
    kv = filled(MIXED, spec, keys, values, dtype=dtype, placement=placement)
    arrays = [kv.pages] + ([] if kv.scales is None else [kv.scales])
    assert [x.sharding.shard_shape(x.shape)[2] for x in arrays] == [spec.num_kv_heads // ways] * len(arrays)
    size, cut = page_bytes(spec, 4, placement, dtype)
    assert (size * MIXED.num_pages, cut) == (sum(x.nbytes for x in arrays), ways)
    context = AttentionContext(mesh=mesh, head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads))
    heads = NamedSharding(mesh, PartitionSpec(None, context.head_axes or None))
    new = [jax.device_put(x, heads) for x in (query, keys[: len(query)], values[: len(query)])]

    def step(kv: PagedKV, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[PagedKV, jax.Array]:
        kv = write(kv, key, value, MIXED.batch)
        return kv, paged_attention(query, kv, MIXED.batch, spec, sinks=jnp.asarray(sinks), context=context)

    compiled = jax.jit(step, donate_argnums=0).lower(kv, *new).compile()
    assert not collectives(str(compiled.as_text()))
    alone = attended(MIXED, spec, query, filled(MIXED, spec, keys, values, dtype=dtype), sinks)
    found = attended(MIXED, spec, new[0], kv, sinks, mesh=mesh, head_axes=context.head_axes)
    np.testing.assert_allclose(found, alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_donated_pages_stay_where_they_are(dtype: str) -> None:
    kv = empty_pages(GQA, 4096, 16, Placement(), jnp.dtype(dtype))
    query, keys, values, _ = numbers(DECODE, GQA)
    new = [jnp.asarray(x[: DECODE.tokens]) for x in (query, keys, values)]

    def step(kv: PagedKV, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[PagedKV, jax.Array]:
        kv = write(kv, key, value, DECODE.batch)
        return kv, paged_attention(query, kv, DECODE.batch, GQA, context=AttentionContext())

    compiled = jax.jit(step, donate_argnums=0).lower(kv, *new).compile()
    memory: Any = compiled.memory_analysis()
    pool = sum(x.nbytes for x in jax.tree.leaves(kv))
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 10, "a second pool is made somewhere"
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(kv)]
    after, _ = compiled(kv, *new)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == places


# The TPU kernel's arguments, with a description of what it does in its place


def kernel_as_described(
    query: Any,
    pages: Any,
    kv_lens: Any,
    tables: Any,
    query_starts: Any,
    num_seqs: Any,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_kv_pages_per_block: int,
    num_queries_per_block: int,
    **scales: None,
) -> jax.Array:
    """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, whose positions count from the first table entry."""
    query, pages, kv_lens, tables, query_starts = (np.asarray(x) for x in (query, pages, kv_lens, tables, query_starts))
    assert 0 < num_kv_pages_per_block <= tables.shape[1] and 0 < num_queries_per_block <= len(query)
    here = int(num_seqs[0])
    counts, lengths = np.diff(query_starts)[:here].tolist(), kv_lens[:here].tolist()
    assert min(counts) > 0 and query_starts[0] == 0
    found = pages[tables[:here]].reshape(here, -1, pages.shape[2] // 2, 2, pages.shape[3])
    kept = np.concatenate([found[row, :length] for row, length in enumerate(lengths)])
    heads, dim = kept.shape[1], kept.shape[3]
    spec = AttentionSpec(
        query.shape[1], heads, dim, scale=sm_scale, window=sliding_window, logit_softcap=soft_cap
    )
    real = query[: sum(counts)].reshape(-1, heads, spec.q_per_kv, dim)
    mixed = np.full(query.shape, np.nan, np.float32)
    mixed[: len(real)] = oracle(counts, lengths, real, kept[:, :, 0], kept[:, :, 1], spec).reshape(-1, *query.shape[1:])
    return jnp.asarray(mixed)


def test_padding_that_the_kernel_leaves_in_decode_steps_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without our own kernels come to it. Layers clear other steps themselves."""
    query, keys, values, _ = numbers(DECODE, GQA)
    kv = replace(filled(DECODE, GQA, keys, values), combined=1)
    padding = np.asarray(DECODE.batch.positions) < 0
    monkeypatch.setattr(api, "serves", lambda *_, **__: None)

    def left(query: jax.Array, *_: Any) -> jax.Array:
        return jnp.where(padding[:, None, None, None], jnp.nan, query)

    monkeypatch.setattr(kernel, "attend", left)
    on_tpu = AttentionContext(platform="tpu")
    mixed = paged_attention(jnp.asarray(query), kv, DECODE.batch, GQA, context=on_tpu, own=False)
    assert DECODE.batch.max_queries == 1
    assert padding.any() and np.isfinite(np.asarray(mixed)).all()
    np.testing.assert_array_equal(np.asarray(mixed)[~padding], query[~padding])


@pytest.mark.parametrize(
    "spec",
    [GQA, replace(GQA, window=9, logit_softcap=3.0), replace(GQA, chunk=8), replace(GQA, v_head_dim=4)],
    ids=["plain", "window", "chunk", "value_dim"],
)
def test_the_kernel_is_given_what_the_reference_computes(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    library = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention"
    monkeypatch.setattr(library, kernel_as_described)
    query, keys, values, _ = numbers(MIXED, spec)
    # One device's part of pages whose 2 KV heads have another 2 of zeros behind them.
    kv = PagedKV(jnp.zeros((MIXED.num_pages, MIXED.batch.page_size, 8, 128)), combined=1)
    kv = jax.jit(write)(kv, jnp.asarray(keys), jnp.asarray(values), whole(MIXED).batch)
    wanted = oracle(MIXED.counts, MIXED.lengths, query, keys, values, spec)
    by_kernel = np.asarray(kernel.attend(jnp.asarray(query), kv, MIXED.batch, spec, "TPU v5 lite"))
    by_reference = attended(MIXED, spec, query, kv)
    for found in (by_kernel, by_reference):
        np.testing.assert_allclose(found[: MIXED.real], wanted, atol=2e-6, rtol=0)
    assert np.isfinite(by_reference).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"window": 9}, None),
        ({"sinks": True}, "sinks"),
        ({"head_dim": 256}, "128 features"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float16"}, "float16"),
        ({"value_in_key": True}, "first features"),
        ({"platform": "cpu"}, "TPUs"),
    ],
)
def test_serves_says_why_the_kernel_is_not_used(change: dict[str, Any], why: str | None) -> None:
    options = {"platform": "tpu", "dtype": "bfloat16", "value_in_key": False}
    spec = replace(GQA, **{name: value for name, value in change.items() if name not in options})
    found = serves(spec, **{name: change.get(name, value) for name, value in options.items()})
    assert (found is None) if why is None else (found is not None and why in found)


def test_blocks_shrink_with_the_heads_of_a_device() -> None:
    def blocks(heads: int, kv_heads: int, kind: str, **options: Any) -> tuple[int, int]:
        options = {"item_bytes": 2, "pages": 64, "tokens": 512, "decode": False, **options}
        return kernel_blocks(
            kind, query_heads=heads, combined_heads=2 * kv_heads, dim=128, page_size=128, **options
        )

    assert blocks(32, 8, "TPU v5 lite") == (4, 32)  # 64 queries, or 8 pages, exceed its VMEM
    assert blocks(4, 1, "TPU v5 lite") == (4, 128)
    assert blocks(32, 8, "TPU v6 lite") == (8, 32)
    assert blocks(4, 1, "TPU v5 lite", decode=True, pages=2) == (2, 8)
    assert blocks(32, 8, "a later one") == (4, 32)
