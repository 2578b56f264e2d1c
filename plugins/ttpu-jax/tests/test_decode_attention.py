"""The kernel for decode steps is held against the reference. On a CPU it is interpreted: the same path as on a TPU, but
for the compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from ttpu_core.spec import AlibiSpec, AttentionSpec
from ttpu_jax.ops.attention import IMPLEMENTATIONS, AttentionContext, attend, paired, visibility, write_and_attend
from ttpu_jax.ops.attention.decode import LARGEST_WHOLE, serves, writes
from ttpu_jax.ops.attention.decode_kernel import BLOCK_BYTES, attended_rows, block_at, block_slots

GQA = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
MQA = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=128)
ON_CACHE = AttentionContext(platform="cpu", own_keys=False)


@dataclass(frozen=True)
class Case:
    """A layer, and rows whose newest token is at `ends` - 1 of `slots` slots, after `left` slots of padding."""

    spec: AttentionSpec
    slots: int = 384
    end: int = 300
    left: tuple[int, ...] = (0, 37, 299)
    ring: bool = False
    packed: bool = False

    def arrays(self, dtype: Any = jnp.float32) -> dict[str, Any]:
        spec, batch = self.spec, len(self.left)
        keys = jax.random.split(jax.random.key(0), 4)

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)  # numbers that bfloat16 has too

        slot = np.arange(self.slots)
        if self.ring:  # the newest slot at each place
            slot = self.end - 1 - (self.end - 1 - slot) % self.slots
        starts = np.array(self.left)[:, None]
        segments = None
        if self.packed:
            of_keys = np.broadcast_to(slot // 100, (batch, self.slots))
            segments = jnp.full((batch, 1), (self.end - 1) // 100), jnp.asarray(of_keys)
        return {
            "query": normal(keys[0], batch, 1, spec.num_kv_heads, spec.q_per_kv, spec.head_dim),
            "key": normal(keys[1], batch, spec.num_kv_heads, self.slots, spec.head_dim),
            "value": normal(keys[2], batch, spec.num_kv_heads, self.slots, spec.value_dim),
            "query_positions": jnp.asarray(self.end - 1 - starts),
            "key_positions": jnp.asarray(slot[None] - starts),
            "sinks": normal(keys[3], spec.num_kv_heads, spec.q_per_kv) + 2 if spec.sinks else None,
            "segment_ids": segments,
        }


CASES = {
    "groups of query heads, left padding": Case(GQA),
    "one key head": Case(MQA),
    "one key head, rows that see more than the first one": Case(MQA, left=(299, 37, 0)),
    "four rows of two heads, two at a time, sinks": Case(replace(GQA, sinks=True), left=(0, 37, 299, 5)),
    "heads of 256": Case(AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256)),
    "odd heads, narrow values": Case(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80, v_head_dim=48)),
    "narrow values alone": Case(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=64)),
    "narrow keys alone": Case(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=192, v_head_dim=128)),
    "wide values": Case(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=128)),
    "window": Case(replace(GQA, window=70)),
    "ring": Case(replace(GQA, window=200), slots=256, end=1000, left=(0, 37, 990), ring=True),
    "chunk": Case(replace(GQA, chunk=128)),
    "softcap, sinks, scale": Case(replace(GQA, logit_softcap=3.0, sinks=True, scale=0.3)),
    "sinks and a window": Case(replace(GQA, sinks=True, window=5)),
    "packed": Case(GQA, packed=True),
    "few slots": Case(GQA, slots=40, end=33, left=(0, 3, 32)),
    "the last slot": Case(GQA, end=384),
    "the first slot": Case(GQA, end=1, left=(0, 0, 0)),
}


def both(case: Case, dtype: Any = jnp.float32, context: AttentionContext = ON_CACHE) -> tuple[np.ndarray, np.ndarray]:
    arrays = case.arrays(dtype)
    sinks, segments = arrays.pop("sinks"), arrays.pop("segment_ids")
    found = []
    for name, where in (("decode_attention", context), ("eager", replace(context, mesh=None))):

        def run(*values: Any, name: str = name, where: AttentionContext = where) -> jax.Array:
            return attend(name, *values, case.spec, sinks=sinks, segment_ids=segments, context=where)

        found.append(np.asarray(jax.jit(run)(*arrays.values()), np.float32))
    return found[0], found[1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of 128 slots."""
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_equals_the_reference(case: Case) -> None:
    ours, theirs = both(case)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


WRITTEN = {name: case for name, case in CASES.items() if case.slots % 128 == 0 and not case.packed}


def written(case: Case, dtype: Any = jnp.float32, context: AttentionContext = ON_CACHE) -> list[np.ndarray]:
    """What `write_and_attend` gives of a cache without the newest token, which has large numbers in its place; and what
    the reference gives of one that has it."""
    arrays = case.arrays(dtype)
    sinks, slot = arrays.pop("sinks"), (case.end - 1) % case.slots
    del arrays["segment_ids"]
    pairs = paired(*(arrays[name][:, :, slot : slot + 1] for name in ("key", "value")))
    before = [arrays[name].at[:, :, slot].set(1e4) for name in ("key", "value")]

    def run(query: jax.Array, key: jax.Array, value: jax.Array, pairs: jax.Array, *positions: jax.Array) -> Any:
        slot, *at = positions
        return write_and_attend(query, key, value, pairs, slot, *at, case.spec, sinks=sinks, context=context)

    positions = arrays["query_positions"], arrays["key_positions"]
    found = jax.jit(run)(arrays["query"], *before, pairs, jnp.int32(slot), *positions)
    mixed = attend("eager", *arrays.values(), case.spec, sinks=sinks, context=replace(context, mesh=None))
    return [np.asarray(one, np.float32) for one in (*found, mixed, arrays["key"], arrays["value"])]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in WRITTEN), ("odd heads, narrow values", jnp.bfloat16), ("ring", jnp.bfloat16)],
)
def test_it_writes_the_token_that_a_row_adds(name: str, dtype: Any) -> None:
    mixed, key, value, expected, *cache = written(WRITTEN[name], dtype)
    bound = 1e-5 if dtype == jnp.float32 else 2**-6
    assert np.abs(mixed - expected).max() <= bound * np.abs(expected).max()
    np.testing.assert_array_equal(key, cache[0])
    np.testing.assert_array_equal(value, cache[1])


@pytest.mark.parametrize("name", ["odd heads, narrow values", "ring"])
def test_copies_of_new_tokens_are_waited_for(name: str) -> None:
    """In JAX's interpreter of a whole TPU, where a copy is made when it is waited for."""
    case, interpreter = WRITTEN[name], pltpu.InterpretParams(dma_execution_mode="on_wait")
    arrays, slot = case.arrays(jnp.bfloat16), (case.end - 1) % case.slots
    query, *cache = (arrays[name] for name in ("query", "key", "value"))
    pairs = paired(*(one[:, :, slot : slot + 1] for one in cache))
    width = (0, pairs.shape[-1] - query.shape[-1])
    rows = jnp.concatenate([jnp.pad(query, [*[(0, 0)] * 4, width]), pairs], axis=3)[:, 0]
    visible = visibility(arrays["query_positions"], arrays["key_positions"], case.spec)
    run = jax.jit(lambda *given: attended_rows(*given, spec=case.spec, interpret=interpreter))
    before = [one.at[:, :, slot].set(1e4) for one in cache]
    _, *after = run(rows, *before, visible, None, jnp.int32(slot))
    for ours, expected in zip(after, cache, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_blocks_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot lies in the second of three blocks of 256."""
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", 256 * 4 * 64 * 4)
    mixed, key, value, expected, *cache = written(Case(GQA, slots=768, end=450, left=(0, 37)))
    assert np.abs(mixed - expected).max() <= 1e-5 * np.abs(expected).max()
    np.testing.assert_array_equal(key, cache[0])
    np.testing.assert_array_equal(value, cache[1])


def test_a_token_that_no_query_sees_is_written_too() -> None:
    """Here it lies in a block behind all that they see."""
    arrays, slot = Case(GQA, end=120, left=(0, 3)).arrays(), 300
    query, *cache = (arrays[name] for name in ("query", "key", "value"))
    pairs = paired(*(one[:, :, slot : slot + 1] for one in cache))
    before = [one.at[:, :, slot].set(1e4) for one in cache]
    positions = arrays["query_positions"], arrays["key_positions"]
    mixed, *after = write_and_attend(query, *before, pairs, jnp.int32(slot), *positions, GQA, context=ON_CACHE)
    expected = attend("eager", query, *cache, *positions, GQA, context=ON_CACHE)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)
    for ours, one in zip(after, cache, strict=True):
        np.testing.assert_array_equal(ours, one)


@pytest.mark.parametrize(
    ("spec", "slots", "item", "expected"),
    [
        (GQA, 256, 2, True),
        (GQA, 200, 2, False),  # not whole tiles
        (GQA, 256, 1, False),  # of which tiles have 32 slots
        (AttentionSpec(num_heads=64, num_kv_heads=64, head_dim=64), 256, 4, True),
        (AttentionSpec(num_heads=64, num_kv_heads=64, head_dim=96), 256, 4, False),  # more than VMEM has
        (AttentionSpec(num_heads=96, num_kv_heads=96, head_dim=128), 256, 4, True),
    ],
)
def test_what_it_writes(spec: AttentionSpec, slots: int, item: int, expected: bool) -> None:
    assert writes(spec, ON_CACHE, 1, slots, item) == expected
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    halves = replace(ON_CACHE, mesh=mesh, head_axes=("tensor",))
    assert writes(spec, halves, 1, slots, item) == (expected or spec.head_dim == 96)


def test_a_row_of_padding_alone_is_written_too() -> None:
    """Its query sees nothing, not even its own token."""
    mixed, key, value, _, *cache = written(Case(GQA, left=(0, 300)))
    assert not mixed[1].any() and mixed[0].any()
    np.testing.assert_array_equal(key, cache[0])
    np.testing.assert_array_equal(value, cache[1])


def test_devices_write_their_rows_and_heads() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    context = replace(ON_CACHE, mesh=mesh, batch_axes=("data",), head_axes=("tensor",))
    mixed, key, value, expected, *cache = written(Case(replace(GQA, sinks=True), left=(0, 37, 5, 1)), context=context)
    assert np.abs(mixed - expected).max() <= 1e-5 * np.abs(expected).max()
    np.testing.assert_array_equal(key, cache[0])
    np.testing.assert_array_equal(value, cache[1])


@pytest.mark.parametrize(
    ("first", "last", "begin", "visited"),
    [
        (0, 3, 0, [0, 1, 2, 3, 3]),
        (0, 3, 3, [3, 0, 1, 2, 2]),
        (0, 3, 1, [1, 0, 2, 3, 3]),
        (1, 2, 2, [2, 1, 1, 1, 1]),
        (4, 4, 4, [4, 4, 4, 4, 4]),
    ],
)
def test_the_block_of_the_new_token_is_read_first_and_each_once(
    first: int, last: int, begin: int, visited: list[int]
) -> None:
    """A block that is the one before is not read again."""
    order = [jnp.array([one]) for one in (first, last, begin)]
    assert [int(block_at(0, number, *order)) for number in range(5)] == visited


def test_in_bfloat16_it_is_as_near_as_bfloat16_is() -> None:
    ours, theirs = both(CASES["groups of query heads, left padding"], jnp.bfloat16)
    exact = both(CASES["groups of query heads, left padding"])[1]
    assert np.abs(ours - exact).max() <= 1.5 * np.abs(theirs - exact).max() + 2**-9 * np.abs(exact).max()


def test_a_cache_of_another_dtype_than_the_query() -> None:
    case = CASES["one key head"]
    arrays = {name: array for name, array in case.arrays().items() if name not in ("sinks", "segment_ids")}
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("key", "value")}
    ours, theirs = (
        attend(name, *arrays.values(), case.spec, context=ON_CACHE) for name in ("decode_attention", "eager")
    )
    assert ours.dtype == theirs.dtype == jnp.float32
    assert np.abs(ours - theirs).max() <= 2**-7 * np.abs(theirs).max()


def test_blocks_that_no_query_sees_are_not_computed() -> None:
    """What is not a number there, as in memory that nobody wrote, does not come into the result."""
    case = Case(replace(GQA, window=70), left=(0,))
    arrays = case.arrays()
    unseen = np.arange(case.slots) < 128  # the first of three blocks; the window begins in the second
    arrays["key"] = jnp.where(unseen[None, None, :, None], jnp.nan, arrays["key"])
    arrays["value"] = jnp.where(unseen[None, None, :, None], jnp.nan, arrays["value"])
    mixed = IMPLEMENTATIONS["decode_attention"].function(**arrays, spec=case.spec, context=ON_CACHE)
    assert np.isfinite(mixed).all()


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    arrays = Case(GQA, left=(0, 1)).arrays()
    arrays["key_positions"] = arrays["key_positions"].at[1].set(-1)
    mixed = IMPLEMENTATIONS["decode_attention"].function(**arrays, spec=GQA, context=ON_CACHE)
    assert not np.asarray(mixed[1]).any() and np.asarray(mixed[0]).any()


@pytest.mark.parametrize(("shape", "batch"), [((2, 2), True), ((1, 2), False)])
def test_on_several_devices_it_equals_the_reference_on_one(shape: tuple[int, int], batch: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "tensor"))
    context = replace(ON_CACHE, mesh=mesh, batch_axes=("data",) if batch else (), head_axes=("tensor",))
    ours, theirs = both(Case(replace(GQA, sinks=True, window=100), left=(0, 37, 5, 1)), context=context)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("spec", "context", "queries", "keys", "reason"),
    [
        (GQA, replace(ON_CACHE, own_keys=True), 1, 256, "attends to a cache"),
        (GQA, replace(ON_CACHE, platform="gpu"), 1, 256, "for TPUs"),
        (GQA, replace(ON_CACHE, sequence_axes=("sequence",)), 1, 256, "whole cache"),
        (replace(GQA, alibi=AlibiSpec()), ON_CACHE, 1, 256, "ALiBi"),
        (GQA, ON_CACHE, 2, 256, "one query"),
        (GQA, replace(ON_CACHE, of_stack=True), 1, 256, "would be copied"),
        (GQA, ON_CACHE, 1, 4097, "4,097 slots are not a multiple of 128"),
        (GQA, ON_CACHE, 1, 2000, None),
        (GQA, replace(ON_CACHE, platform="tpu"), 1, 4096, None),
        (replace(MQA, v_head_dim=96), replace(ON_CACHE, platform="tpu"), 1, 4096, None),
        (replace(MQA, v_head_dim=40), replace(ON_CACHE, platform="tpu"), 1, 4096, "heads have 40 features"),
        (MQA, replace(ON_CACHE, platform="tpu"), 1, 4096, None),
    ],
)
def test_what_it_does_not_serve(
    spec: AttentionSpec, context: AttentionContext, queries: int, keys: int, reason: str | None
) -> None:
    found = serves(spec, context, queries, keys)
    assert (found is None) if reason is None else (reason in str(found))


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", BLOCK_BYTES)
    assert block_slots(2048, 256) == 2048, "which takes 512 KiB"
    assert LARGEST_WHOLE == 4 * BLOCK_BYTES
    assert block_slots(8192, 256) == 2048
    assert block_slots(1152, 8 * 512) == 128 and block_slots(1152, 1024) == 384
    assert block_slots(2000, 256) == 2000
