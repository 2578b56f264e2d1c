"""Gated DeltaNet's functions: the chunked form is the recurrent one, both are transformers', and padding and the way in
which a sequence is cut change nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_jax.ops.convolution import causal_convolution
from ttpu_qwen.jax import gated_delta_net
from ttpu_qwen.jax.gated_delta_net import l2_normalize, unit_lower_inverse

chunked: Any = jax.jit(gated_delta_net.chunk_gated_delta_rule, static_argnames="chunk")
recurrent: Any = jax.jit(gated_delta_net.recurrent_gated_delta_rule)

BATCH, SEQ, KEY_HEADS, VALUES_PER_KEY, KEY_DIM, VALUE_DIM = 2, 37, 2, 3, 8, 12
TOLERANCE = 2e-6  # of the largest value: float32 rounds by 6e-8, and some ten roundings follow one another

Inputs = tuple[jax.Array, ...]


def inputs(seq: int = SEQ, decay: float = 1.0, seed: int = 0) -> Inputs:
    """query, key, value, decay and beta; `decay` scales how fast the state forgets."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(BATCH, seq, KEY_HEADS, *shape)), jnp.float32)

    query, key = l2_normalize(normal(KEY_DIM)), l2_normalize(normal(KEY_DIM))
    forget = -decay * jnp.exp(normal(VALUES_PER_KEY) - 2)
    return query, key, normal(VALUES_PER_KEY, VALUE_DIM), forget, jax.nn.sigmoid(normal(VALUES_PER_KEY))


def some_state() -> jax.Array:
    shape = (BATCH, KEY_HEADS, VALUES_PER_KEY, KEY_DIM, VALUE_DIM)
    return jnp.asarray(np.random.default_rng(9).normal(size=shape), jnp.float32)


def part(arrays: Inputs, where: slice) -> Inputs:
    return tuple(array[:, where] for array in arrays)


def assert_close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("decay", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("seq", [2, 37, 130])
def test_the_chunked_form_is_the_recurrent_one_for_any_length(seq: int, decay: float) -> None:
    arrays, state = inputs(seq, decay), some_state()
    for ours, wanted in zip(chunked(*arrays, state), recurrent(*arrays, state), strict=True):
        assert_close(ours, wanted, TOLERANCE * max(1, decay))  # it takes differences of sums of decays


def test_the_size_of_chunks_does_not_matter() -> None:
    arrays = inputs()
    whole = chunked(*arrays, chunk=64)
    for chunk in (2, 16):
        for ours, wanted in zip(chunked(*arrays, chunk=chunk), whole, strict=True):
            assert_close(ours, wanted)


def test_keys_that_repeat_for_a_whole_chunk_stay_exact() -> None:
    """The worst case of the triangular system: every coupling is near 1, and a power series would lose all digits."""
    query, key, value, decay, _ = inputs(128)
    key = jnp.broadcast_to(key[:, :1], key.shape)
    arrays = (query, key, value, decay * 0, jnp.full_like(decay, 0.999))
    assert_close(chunked(*arrays)[0], recurrent(*arrays)[0])


@pytest.mark.parametrize("cuts", [(8, 16, 24, 32), (1, 2, 36)])
def test_a_sequence_in_parts_gives_what_the_whole_does(cuts: tuple[int, ...]) -> None:
    arrays = inputs()
    wanted, last = chunked(*arrays)
    state, outs = None, []
    for start, stop in zip((0, *cuts), (*cuts, SEQ), strict=True):
        rule = recurrent if stop - start == 1 else chunked
        out, state = rule(*part(arrays, slice(start, stop)), state)
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), wanted)
    assert_close(state, last)


def test_the_state_becomes_zero_before_each_start() -> None:
    """Token by token, a decay to nothing does the same. Starts lie in, at the end and at the beginning of chunks of 8,
    and two are neighbours."""
    query, key, value, decay, beta = inputs()
    starts = jnp.zeros((BATCH, SEQ), bool).at[0, jnp.array([5, 15, 16, 27])].set(True).at[1, 3].set(True)
    forgetting = jnp.where(starts[..., None, None], -1e4, decay)
    wanted = recurrent(query, key, value, forgetting, beta, some_state())
    found = chunked(query, key, value, decay, beta, some_state(), chunk=8, starts=starts)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs)


def test_tokens_without_decay_and_beta_leave_the_state_as_it_is() -> None:
    query, key, value, decay, beta = inputs()
    state = some_state()
    for rule in (recurrent, chunked):
        after = rule(query, key, value, decay * 0, beta * 0, state)[1]
        assert_close(after, state)


@pytest.mark.parametrize("seq", [1, 2, 4, 32, 64])
def test_the_inverse_of_a_unit_lower_matrix_is_exact(seq: int) -> None:
    lower = jnp.tril(jnp.asarray(np.random.default_rng(0).normal(size=(3, seq, seq)) * 0.3, jnp.float32), -1)
    wanted = np.linalg.inv(np.eye(seq) + np.asarray(lower, np.float64))
    assert_close(unit_lower_inverse(lower), wanted, 1e-5)


def test_the_inverse_has_the_gradient_of_an_inverse() -> None:
    rng = np.random.default_rng(0)
    lower, weights = (jnp.asarray(rng.normal(size=(16, 16)), jnp.float32) for _ in range(2))
    lower = jnp.tril(lower, -1) * 0.2
    ours = jax.grad(lambda x: (unit_lower_inverse(x) * weights).sum())(lower)
    wanted = jax.grad(lambda x: (jnp.linalg.inv(jnp.eye(16) + x) * weights).sum())(lower)
    assert_close(ours, wanted, 1e-5)


def test_the_convolution_continues_from_its_window() -> None:
    x = inputs()[0]
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(4, KEY_HEADS, KEY_DIM)), jnp.float32)
    whole, last = causal_convolution(x, kernel)
    window, outs = None, []
    for start, stop in ((0, 2), (2, 3), (3, 20), (20, SEQ)):
        out, window = causal_convolution(x[:, start:stop], kernel, window)
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), whole, 0)
    np.testing.assert_array_equal(window, last)
    np.testing.assert_array_equal(window, x[:, -3:])


@pytest.mark.parametrize("seq", [1, 6])
def test_the_window_ends_with_the_last_token_that_is_no_padding(seq: int) -> None:
    x = jnp.arange(1.0, 2 * seq + 1).reshape(2, seq, 1)
    kernel, window = jnp.ones((4, 1)), -jnp.arange(1.0, 7).reshape(2, 3, 1)
    valid = jnp.arange(seq)[None] < jnp.array([[0], [seq - 1]])  # a row of padding alone, and one with some at its end
    after = causal_convolution(x, kernel, window, valid)[1]
    np.testing.assert_array_equal(after[0], window[0])
    np.testing.assert_array_equal(after[1], jnp.concatenate([window[1], x[1, : seq - 1]])[-3:])


def torch_arguments(arrays: Inputs, *, gradients: bool = False) -> list[Any]:
    """query, key [batch, seq, heads, dim], value, decay, beta as transformers' functions take them."""
    import torch

    query, key, value, decay, beta = (np.asarray(array) for array in arrays)
    heads = (BATCH, query.shape[1], KEY_HEADS * VALUES_PER_KEY)
    shaped = (query, key, value.reshape(*heads, VALUE_DIM), decay.reshape(heads), beta.reshape(heads))
    return [torch.tensor(array, requires_grad=gradients) for array in shaped]


@pytest.mark.torch
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("with_state", [False, True])
def test_both_forms_are_those_of_transformers(form: str, with_state: bool) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as reference

    arrays, state = inputs(100), some_state() if with_state else None
    theirs = getattr(reference, f"torch_{form}_gated_delta_rule")
    initial = torch.tensor(np.asarray(state)).flatten(1, 2) if with_state else None
    wanted, last = theirs(*torch_arguments(arrays), initial_state=initial, output_final_state=True)
    ours, after = {"chunk": chunked, "recurrent": recurrent}[form](*arrays, state)
    assert_close(ours, wanted.numpy().reshape(ours.shape))
    assert_close(after, last.numpy().reshape(after.shape))


@pytest.mark.torch
@pytest.mark.parametrize("rule", [chunked, recurrent])
def test_gradients_of_both_forms_are_those_of_torch(rule: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    arrays = inputs(40)
    weights = np.random.default_rng(5).normal(size=arrays[2].shape).astype(np.float32)
    ours = jax.grad(lambda *each: (rule(*each)[0] * weights).sum(), argnums=tuple(range(5)))(*arrays)
    leaves = torch_arguments(arrays, gradients=True)
    out, _ = torch_recurrent_gated_delta_rule(*leaves)
    (out * torch.tensor(weights).reshape(out.shape)).sum().backward()
    for mine, leaf in zip(ours, leaves, strict=True):
        assert_close(mine, leaf.grad.numpy().reshape(mine.shape), 1e-5)
