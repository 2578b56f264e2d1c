"""Queries, keys and values that a TPU norms and turns in the same operations are those that are computed apart,
whatever a layer does to them: logits of a prompt's last token, the cache, a decode step, and pages. On a CPU in
float32, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from paged_cases import ragged

from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)
from ttpu_core.spec.attention import DifferentialSpec, QueryTemperature
from ttpu_core.spec.rope import RopeSpec
from ttpu_jax.model import attention
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.paged import paged_layout
from ttpu_jax.model.step_cache import Keys, PagedCache
from ttpu_jax.params.placement import local_placement

NORM, ROPE, KIND = NormSpec(), RopeSpec(rotary_dim=8), np.dtype(np.float32)
PLAIN = AttentionSpec(4, 2, 8, rope=ROPE)
NORMED = replace(PLAIN, q_norm=NORM, k_norm=NORM)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 11)).astype(np.int32)
ATTENTION = {
    "plain": (PLAIN, PLAIN),
    "without rope": (replace(PLAIN, rope=None),) * 2,
    "norms of queries and keys": (NORMED, PLAIN),
    "norms of keys alone": (replace(PLAIN, k_norm=NORM),) * 2,
    "norms after rope": (replace(NORMED, qk_norm_after_rope=True),) * 2,
    "norms, bounds and scales of values": (replace(NORMED, v_norm=NORM, clip_qkv=0.3, value_scale=0.5),) * 2,
    "values that are keys": (replace(NORMED, value_is_key=True),) * 2,
    "values of another size": (replace(PLAIN, v_head_dim=6),) * 2,
    "some features, in pairs": (replace(PLAIN, rope=replace(ROPE, rotary_dim=4, layout="interleaved")),) * 2,
    "two maps": (replace(PLAIN, rope=replace(ROPE, rotary_dim=4), differential=DifferentialSpec(0.2, NORM)),) * 2,
    "temperature of queries": (replace(PLAIN, query_temperature=QueryTemperature(0.1, 4.0)),) * 2,
    "keys of another layer": (PLAIN, replace(PLAIN, kv_from_layer=0, q_norm=NORM)),
}


def decoder(name: str) -> tuple[DecoderModel, dict[str, jax.Array]]:
    layers = tuple(LayerSpec(one, MLPSpec(16), NORM) for one in ATTENTION[name])
    spec = ArchitectureSpec("tiny", EmbeddingSpec(61, 12), layers, NORM, HeadSpec(), 64)
    random = np.random.default_rng(3)
    params = {
        path: jax.numpy.asarray(random.standard_normal(parameter.shape) * 0.3 + (parameter.init == "ones"), KIND)
        for path, parameter in spec.parameters.items()
    }
    return causal_model(spec, Runtime(local_placement(None), ropes=different_ropes(spec.layers))), params


def generated(name: str) -> list[np.ndarray]:
    """Logits of the last token of prompts, what is kept of them, and logits of the next token."""
    model, params = decoder(name)
    jax.clear_caches()  # layers that were traced in another form
    cache = model.empty_cache(len(TOKENS), TOKENS.shape[1] + 1, KIND)
    last, cache = jax.jit(partial(model.forward, last_only=True, fresh=True))(params, TOKENS, cache=cache)
    following, _ = jax.jit(model.forward)(params, TOKENS[:, -1:], cache=cache)
    return [np.asarray(each) for each in (last, *jax.tree.leaves(cache), following)]


def served(name: str) -> list[np.ndarray]:
    """Hidden states of three prompts of a step over pages, and the pages."""
    model, params = decoder(name)
    jax.clear_caches()
    case = ragged([3, 7, 6], [3, 7, 6], tokens=16)
    layout = paged_layout(model.spec, 64)
    caches = model.empty_paged_cache(layout, (case.num_pages,) * len(layout.groups), 3, 4, KIND, KIND)
    step = jax.jit(model.ragged_forward)
    return [np.asarray(each) for each in jax.tree.leaves(step(params, TOKENS.reshape(-1)[:16], case.batch, caches))]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert not any(np.isnan(each).any() for each in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(autouse=True)
def _nothing_stays_traced() -> Iterator[None]:
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("name", "up_to"), [*((name, 512) for name in ATTENTION), ("norms of queries and keys", 0), ("two maps", 0)]
)
def test_a_model_generates_the_same(name: str, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without values that go through the product of the rope."""
    expected = generated(name)
    monkeypatch.setattr(Runtime, "rotates_by_product", True)
    monkeypatch.setattr(attention, "TURNS_VALUES_TO", up_to)
    assert_equal(generated(name), expected)


@pytest.mark.parametrize(
    ("name", "in_pairs"),
    [
        ("plain", True),
        ("norms of queries and keys", True),
        ("norms, bounds and scales of values", False),
        ("values of another size", False),
        ("two maps", True),
    ],
)
def test_pages_hold_the_same(name: str, in_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are written as pairs if pages take pairs, and if values are cached as the projection gives them.
    """
    written = []

    def split(cache: PagedCache, pairs: jax.Array) -> tuple[PagedCache, Keys]:
        written.append(pairs.shape)
        return cache.write(*(pairs[..., plane, :].transpose(0, 2, 1, 3) for plane in range(2)))

    expected = served(name)
    monkeypatch.setattr(Runtime, "rotates_by_product", True)
    monkeypatch.setattr(PagedCache, "takes_pairs", True)
    monkeypatch.setattr(PagedCache, "write_pairs", split)
    assert_equal(served(name), expected)
    assert bool(written) == in_pairs
