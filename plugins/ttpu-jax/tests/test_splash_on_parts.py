"""The splash kernel for sequences that are sharded, against the reference: forward and gradient, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequence_cases import ALL_THREE, BATCH, SPEC, arrays, check_gradient, context, layers, positions

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AlibiSpec
from ttpu_jax.ops.attention import api, choice
from ttpu_jax.ops.attention.blocks import fit
from ttpu_jax.ops.attention.reference import eager
from ttpu_jax.ops.attention.splash import serves, splash_attention

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 70},
    {"chunk": 100},
    {"logit_softcap": 2.0},
    {"causal": False},
    {"sinks": True},
    {"scale": 0.3},
)


@pytest.mark.parametrize(
    ("sizes", "length", "change"),
    [
        ({"sequence": 4}, 512, {}),
        ({"sequence": 4}, 512, {"window": 200}),
        ({"sequence": 2}, 1280, {}),
        *((ALL_THREE, 256, one) for one in CHANGES),
    ],
)
def test_it_gives_what_the_reference_gives(sizes: dict[str, int], length: int, change: dict[str, Any]) -> None:
    spec, (query, key, value, sinks) = replace(SPEC, **change), arrays(length)
    given: dict[str, Any] = {"sinks": sinks if spec.sinks else None}
    at, where = positions(length), context(sizes)
    assert serves(spec, where, length, length) is None
    expected = eager(query, key, value, at, at, spec, **given)
    found = jax.jit(lambda *x: splash_attention(*x, at, at, spec, context=where, **given))(query, key, value)
    np.testing.assert_allclose(found, expected, atol=5e-6)


def test_padding_and_packed_segments_are_honoured() -> None:
    query, key, value, _ = arrays(512)
    at = positions(512, padding=150)
    segments = jnp.arange(512)[None].repeat(BATCH, 0) // 111
    for ids in (None, (segments, segments)):
        expected = eager(query, key, value, at, at, SPEC, segment_ids=ids)
        found = splash_attention(query, key, value, at, at, SPEC, segment_ids=ids, context=context({"sequence": 4}))
        shown = np.asarray(at >= 0)
        np.testing.assert_allclose(np.asarray(found)[shown], np.asarray(expected)[shown], atol=5e-6)
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("sizes", [{"sequence": 4}, ALL_THREE, {"expert": 2, "sequence": 2}])
def test_its_gradient_is_the_reference_s(sizes: dict[str, int]) -> None:
    """The axis `expert` shards neither batch nor heads: its devices compute the same."""
    check_gradient(splash_attention, sizes, 512, window=170, atol=3e-5)


def test_only_keys_and_values_are_gathered() -> None:
    query, key, value, _ = arrays(512)
    at, where = positions(512), context({"sequence": 4})
    traced = str(jax.make_jaxpr(lambda *x: splash_attention(*x, at, at, SPEC, context=where))(query, key, value))
    assert traced.count("all_gather[") == 3, "keys, values and their segments"


def test_auto_takes_it_on_a_tpu_and_ring_attention_where_it_does_not_serve() -> None:
    found = choice.choose("auto", layers(SPEC), "tpu", sequence_axes=("sequence",))
    (kind,) = found.kinds
    assert (found.name, kind.prefill, kind.decode) == ("splash_attention", "splash_attention", "eager")
    assert "sharded along sequence, are gathered" in found.reason
    assert choice.choose("auto", layers(SPEC), "cpu", sequence_axes=("sequence",)).name == "ring_attention"
    splash, where = api.IMPLEMENTATIONS["splash_attention"], context({"sequence": 4}, "tpu")
    for length, name in ((512, "splash_attention"), (520, "ring_attention")):
        assert api.serving(splash, SPEC, where, length, length).name == name
    cache = replace(where, own_keys=False)
    assert api.serving(splash, SPEC, cache, 1, 512).name == "eager"


def test_what_it_does_not_serve_is_said() -> None:
    where = context({"sequence": 4})
    assert "not a multiple of 128 on each device" in str(serves(SPEC, where, 640, 640))
    assert "shards both" in str(serves(SPEC, replace(where, batch_axes=("sequence",)), 512, 512))
    with pytest.raises(UnsupportedError, match="position biases"):
        spec = replace(SPEC, alibi=AlibiSpec())
        choice.choose("splash_attention", layers(spec), "tpu", sequence_axes=("sequence",))


def test_blocks_of_a_part_are_smaller_rather_than_padded() -> None:
    wanted = {"sa_block_q": 1024, "sa_block_kv": 2048, "sa_block_kv_compute": 512}
    for tiles in range(1, 40):
        length, sizes = fit(128 * tiles, wanted, pads=False)
        assert length == 128 * tiles
        assert all(length % size == 0 and size <= wanted[name] for name, size in sizes.items())
        assert sizes["sa_block_kv"] % sizes["sa_block_kv_compute"] == 0
