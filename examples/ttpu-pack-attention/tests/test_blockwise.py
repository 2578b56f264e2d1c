"""Attention in blocks against the reference, with everything that a layer may ask for, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttpu_core.errors import RequestError
from ttpu_core.spec import AlibiSpec, AttentionSpec
from ttpu_jax.ops.attention import AttentionContext, eager, implementation

from ttpu_pack_attention.blockwise import attend

CONTEXT = AttentionContext()
BATCH, SEQ, KV, GROUP, DIM = 2, 77, 2, 3, 8

SPECS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 9},
    "window both ways": {"window": 9, "causal": False},
    "chunk": {"chunk": 11},
    "softcap": {"logit_softcap": 2.0},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "values of another size": {"v_head_dim": 5},
    "everything": {"window": 20, "chunk": 32, "logit_softcap": 3.0, "scale": 0.5, "sinks": True, "v_head_dim": 12},
}


def spec_of(**changes: Any) -> AttentionSpec:
    return AttentionSpec(num_heads=KV * GROUP, num_kv_heads=KV, head_dim=DIM, **changes)


def arrays(
    spec: AttentionSpec, queries: int = SEQ, keys: int = SEQ, dtype: Any = jnp.float32, seed: int = 0
) -> dict[str, Any]:
    """Random arguments: `queries` tokens at the end of `keys` tokens, the second row padded on the left."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    positions = np.stack([np.arange(keys), np.arange(keys) - 6])
    positions[positions < 0] = -1
    return {
        "query": normal(BATCH, queries, KV, GROUP, DIM),
        "key": normal(BATCH, KV, keys, DIM),
        "value": normal(BATCH, KV, keys, spec.value_dim),
        "query_positions": jnp.asarray(positions[:, keys - queries :]),
        "key_positions": jnp.asarray(positions),
        "sinks": normal(KV, GROUP) if spec.sinks else None,
    }


def both(spec: AttentionSpec, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The result in blocks and the reference's, zero where a query is padding."""
    real = (np.asarray(arguments["query_positions"]) >= 0)[:, :, None, None, None]
    results = (np.asarray(f(**arguments, spec=spec, context=CONTEXT), np.float32) for f in (attend, eager))
    ours, reference = (np.where(real, result, 0) for result in results)
    return ours, reference


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_results_equal_the_reference(changes: dict[str, Any]) -> None:
    spec = spec_of(**changes)
    np.testing.assert_allclose(*both(spec, arrays(spec)), atol=2e-6)


@pytest.mark.parametrize("name", ["causal", "window both ways", "everything"])
def test_gradients_equal_the_reference(name: str) -> None:
    spec = spec_of(**SPECS[name])
    arguments = arrays(spec)
    real = (arguments["query_positions"] >= 0)[:, :, None, None, None]
    names = [name for name in ("query", "key", "value", "sinks") if arguments[name] is not None]

    def gradients(function: Callable[..., jax.Array]) -> dict[str, jax.Array]:
        def loss(chosen: dict[str, jax.Array], rest: dict[str, jax.Array]) -> jax.Array:
            return jnp.where(real, jnp.sin(function(**chosen, **rest, spec=spec, context=CONTEXT)), 0).sum()

        rest = {name: array for name, array in arguments.items() if name not in names}
        return jax.jit(jax.grad(loss))({name: arguments[name] for name in names}, rest)

    ours, reference = gradients(attend), gradients(eager)
    for name in names:
        np.testing.assert_allclose(ours[name], reference[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_queries_at_the_end_of_a_cache_equal_the_reference(queries: int) -> None:
    spec = spec_of(window=30)
    arguments = arrays(spec, queries, keys=150)
    empty = arguments["key_positions"].at[:, 120:].set(-1)  # slots that nothing was written to yet
    arguments |= {"key_positions": empty, "query_positions": arguments["query_positions"] - 30}
    np.testing.assert_allclose(*both(spec, arguments), atol=2e-6)


def test_segments_equal_the_reference() -> None:
    spec = spec_of()
    segments = jnp.repeat(jnp.arange(7), 11)[None].repeat(BATCH, 0)
    positions = jnp.tile(jnp.arange(11), 7)[None].repeat(BATCH, 0)
    arguments = arrays(spec) | {
        "query_positions": positions,
        "key_positions": positions,
        "segment_ids": (segments, segments),
    }
    np.testing.assert_allclose(*both(spec, arguments), atol=2e-6)


def test_bfloat16_is_as_exact_as_the_reference() -> None:
    spec = spec_of()
    exact = both(spec, arrays(spec))[1]
    ours, reference = both(spec, arrays(spec, dtype=jnp.bfloat16))
    assert np.abs(ours - exact).max() <= 1.5 * np.abs(reference - exact).max()


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    spec = spec_of()
    arguments = arrays(spec) | {"key_positions": jnp.full((BATCH, SEQ), -1)}

    def total(value: jax.Array) -> jax.Array:
        return attend(**arguments | {"value": value}, spec=spec, context=CONTEXT).sum()

    result, gradient = jax.value_and_grad(total)(arguments["value"])
    assert result == 0
    assert not gradient.any()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_grows_with_the_sequence_and_not_with_its_square(backward: bool) -> None:
    spec = spec_of()

    def bytes_of(function: Callable[..., jax.Array], seq: int) -> int:
        def total(query: jax.Array, arguments: dict[str, jax.Array]) -> jax.Array:
            return function(query, **arguments, spec=spec, context=CONTEXT).sum()

        rest = arrays(spec, seq, seq)
        program = jax.jit(jax.grad(total) if backward else total)
        statistics = program.lower(rest.pop("query"), rest).compile().memory_analysis()
        return int(statistics.temp_size_in_bytes)

    assert bytes_of(attend, 16_384) <= 2.2 * bytes_of(attend, 8192)
    assert bytes_of(eager, 2048) >= 2.5 * bytes_of(eager, 1024)  # what is avoided


@pytest.mark.parametrize("block", [1, 7, 16, 1000])
def test_blocks_of_any_size_give_the_same_result(block: int) -> None:
    spec = spec_of(window=9)
    arguments = arrays(spec, queries=10, keys=23)
    ours = attend(**arguments, spec=spec, context=AttentionContext(options=(("block", block),)))
    np.testing.assert_allclose(ours, attend(**arguments, spec=spec, context=CONTEXT), atol=2e-6)


@pytest.mark.parametrize("options", [("sa_block_q", 512), ("block", 0), ("block", "many"), ("block", True)])
def test_a_setting_that_is_not_known_is_refused(options: tuple[str, object]) -> None:
    with pytest.raises(RequestError, match="'block', the most tokens"):
        attend(**arrays(spec_of()), spec=spec_of(), context=AttentionContext(options=(options,)))


def test_layers_with_position_biases_are_left_to_the_reference() -> None:
    serves = implementation("ttpu_pack_attention.blockwise:attend").serves
    assert serves(spec_of(), CONTEXT, SEQ, SEQ) is None
    assert "ALiBi" in str(serves(spec_of(alibi=AlibiSpec()), CONTEXT, SEQ, SEQ))
