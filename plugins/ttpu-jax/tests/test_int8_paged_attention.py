"""The kernels for int8 pages, in the interpreter, against the plain version over the same pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paged_cases import Ragged, oracle, ragged, whole

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import PagedKV, empty_pages, int8_blocks, int8_kernel, paged_attention, write
from ttpu_jax.ops.paged_attention.reference import reference
from ttpu_jax.params.placement import Placement

PAGE = 32


@dataclass(frozen=True)
class TpuPlacement(Placement):
    """Pages as on a TPU, on this machine's devices."""

    @property
    def platform(self) -> str:
        return "tpu"


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
        (drawn(2, window=40), AttentionSpec(6, 3, 64, window=40, logit_softcap=3.0, sinks=True), True),
        (drawn(3), AttentionSpec(3, 1, 256, v_head_dim=192, chunk=64), False),
    ],
    ids=["decode", "window, softcap, sinks, three heads", "chunk, 256 features, no integers"],
)
def test_the_kernels_give_what_the_plain_version_gives(
    case: Ragged, spec: AttentionSpec, digits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**int8_blocks._data()["default"], "single_keys": 2 * PAGE, "block_keys": PAGE, "digits": digits}
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
    spec, case = AttentionSpec(4, 2, 256), drawn(4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    placement = TpuPlacement(mesh)
    query, keys, values, _ = numbers(case, spec)
    alone, shared = filled(case, spec, keys, values), filled(case, spec, keys, values, placement)
    heads = placement.mesh_axes(axes.KV_HEADS, 2)
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
