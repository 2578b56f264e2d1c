"""Attention over pages: numbers against an oracle for every knob of a layer, for decode, prefill and mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from paged_cases import Ragged, oracle, ragged, whole

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import PagedKV, empty_pages, page_bytes, paged_attention, write
from ttpu_jax.params.placement import Placement

GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
ONE_DEVICE = AttentionContext()

DECODE = ragged([1, 1, 1], [7, 1, 30], sequences=5, tokens=6)
PREFILL = ragged([9, 40, 1], [9, 40, 1], tokens=64)
MIXED = ragged([1, 1, 1, 6, 37], [13, 64, 5, 6, 50], sequences=8, tokens=64)
DRAFTS = ragged([3, 1, 4, 2], [9, 22, 4, 61], sequences=6, tokens=16, max_queries=4, max_prefills=6)
DRAFTS_AND_PREFILL = ragged([3, 1, 4, 33], [9, 22, 4, 45], sequences=6, tokens=64, max_prefills=6)
CASES = [DECODE, PREFILL, MIXED, DRAFTS, DRAFTS_AND_PREFILL]
NAMES = ["decode", "prefill", "mixed", "drafts", "drafts and prefill"]


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
    run = jax.jit(lambda *arrays: paged_attention(*arrays, spec=spec, sinks=sinks, context=context))
    return np.asarray(run(jnp.asarray(query), kv, case.batch))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize(
    "spec",
    [
        GQA,
        replace(GQA, num_kv_heads=4, v_head_dim=4, scale=0.3),
        replace(GQA, logit_softcap=2.0, window=9),
        replace(GQA, chunk=8, sinks=True),
    ],
    ids=["plain", "value_dim", "softcap and window", "chunk and sinks"],
)
def test_every_knob_gives_what_the_oracle_gives(case: Ragged, spec: AttentionSpec) -> None:
    query, keys, values, sinks = numbers(case, spec)
    kv = filled(case, spec, keys, values)
    found = attended(case, spec, query, kv, sinks if spec.sinks else None)
    wanted = oracle(case, query[: case.real], keys, values, spec, sinks if spec.sinks else None)
    np.testing.assert_allclose(found[: case.real], wanted, atol=2e-6, rtol=0)
    assert np.isfinite(found).all(), "padding tokens must stay numbers"
