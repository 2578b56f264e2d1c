"""Ring attention against the reference: forward and gradient, on meshes that cut the sequence."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequence_cases import ALL_THREE, BATCH, SPEC, arrays, check_gradient, context, layers, positions

from ttpu_core.errors import UnsupportedError
from ttpu_jax.ops.attention import choice
from ttpu_jax.ops.attention.reference import eager
from ttpu_jax.ops.attention.ring import ring_attention

SEQ = 32
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 5},
    {"chunk": 12},
    {"logit_softcap": 2.0},
    {"causal": False},
    {"sinks": True},
    {"scale": 0.3},
)


@pytest.mark.parametrize(
    ("sizes", "change"),
    [({"sequence": 4}, {}), ({"sequence": 8}, {"window": 5}), *((ALL_THREE, one) for one in CHANGES)],
)
def test_it_gives_what_the_reference_gives(sizes: dict[str, int], change: dict[str, Any]) -> None:
    spec, (query, key, value, sinks) = replace(SPEC, **change), arrays(SEQ)
    given: dict[str, Any] = {"sinks": sinks if spec.sinks else None}
    at = positions(SEQ)
    expected = eager(query, key, value, at, at, spec, **given)
    found = jax.jit(lambda *x: ring_attention(*x, at, at, spec, context=context(sizes), **given))(query, key, value)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_padding_and_packed_segments_are_honoured() -> None:
    query, key, value, _ = arrays(SEQ)
    at = positions(SEQ, padding=7)
    segments = jnp.arange(SEQ)[None].repeat(BATCH, 0) // 11
    for ids in (None, (segments, segments)):
        expected = eager(query, key, value, at, at, SPEC, segment_ids=ids)
        found = ring_attention(query, key, value, at, at, SPEC, segment_ids=ids, context=context({"sequence": 4}))
        shown = np.asarray(at >= 0)
        np.testing.assert_allclose(np.asarray(found)[shown], np.asarray(expected)[shown], atol=2e-6)
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize(
    "sizes", [{"sequence": 8}, {"data": 2, "sequence": 2, "tensor": 2}, {"expert": 2, "sequence": 4}]
)
def test_its_gradient_is_the_reference_s(sizes: dict[str, int]) -> None:
    """The axis `expert` cuts neither batch nor heads: its devices compute the same."""
    check_gradient(ring_attention, sizes, SEQ, window=9, atol=1e-5)


def test_no_device_holds_the_keys_of_the_whole_sequence() -> None:
    query, key, value, _ = arrays(SEQ)
    at, ring = positions(SEQ), context({"sequence": 8})
    program = jax.jit(lambda *x: ring_attention(*x, at, at, SPEC, context=ring)).lower(query, key, value).compile()
    text = program.as_text()
    assert "collective-permute" in text and "all-gather" not in text


def test_auto_takes_it_where_the_sequence_is_cut_and_the_kernel_for_tpus_does_not_serve() -> None:
    found = choice.choose("auto", layers(SPEC), "cpu", sequence_axes=("sequence",))
    (kind,) = found.kinds
    assert (found.name, kind.prefill, kind.decode) == ("ring_attention", "ring_attention", "eager")
    assert choice.choose("ring_attention", layers(SPEC), "tpu", sequence_axes=("sequence",)).name == "ring_attention"
    assert choice.choose("eager", layers(SPEC), "tpu", sequence_axes=("sequence",)).name == "eager"


def test_it_is_refused_where_no_axis_cuts_the_sequence() -> None:
    with pytest.raises(UnsupportedError, match="no mesh axis shards the sequence"):
        choice.choose("ring_attention", layers(SPEC), "cpu")


def test_kernels_for_whole_sequences_are_refused_where_it_is_cut() -> None:
    with pytest.raises(UnsupportedError, match="it needs the whole sequence on one device"):
        choice.choose("xla_flash_attention", layers(SPEC), "tpu", sequence_axes=("sequence",))
