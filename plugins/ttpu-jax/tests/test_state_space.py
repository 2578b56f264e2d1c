"""The selective state space: its two forms agree with each other and with transformers, in values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_jax.ops.state_space import chunked_state_space, recurrent_state_space, segment_sums

BATCH, GROUPS, HEADS, DIM, SIZE = 2, 2, 3, 4, 5
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
chunked: Any = jax.jit(chunked_state_space, static_argnames="chunk")


def inputs(seq: int) -> Inputs:
    """x, decay, b, c."""
    random = np.random.default_rng(0)
    shapes = ((GROUPS, HEADS, DIM), (GROUPS, HEADS), (GROUPS, SIZE), (GROUPS, SIZE))
    x, decay, b, c = (jnp.asarray(random.normal(size=(BATCH, seq, *shape)), jnp.float32) for shape in shapes)
    return x, -jnp.abs(decay), b, c


def some_state() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, GROUPS, HEADS, DIM, SIZE)), jnp.float32)


def token_by_token(arrays: Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    outs = []
    for token in range(arrays[0].shape[1]):
        x, decay, b, c = (each[:, token : token + 1] for each in arrays)
        out, state = recurrent_state_space(x, decay, b, c, state)
        outs.append(out)
    return jnp.concatenate(outs, axis=1), state


def assert_close(ours: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=tolerance * float(np.abs(wanted).max()))


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_give_what_tokens_give(chunk: int) -> None:
    arrays, state = inputs(19), some_state()
    wanted, last = token_by_token(arrays, state)
    out, after = chunked(*arrays, state, chunk=chunk)
    assert_close(out, wanted)
    assert_close(after, last)


def test_a_sequence_that_starts_within_a_row_sees_nothing_before_it() -> None:
    arrays, state = inputs(19), some_state()
    starts = jnp.zeros((BATCH, 19), bool).at[0, 5].set(True).at[0, 16].set(True)  # the second row goes on
    out, after = chunked(*arrays, state, chunk=8, starts=starts)
    whole, last = token_by_token(arrays, state)
    assert_close(out[1], whole[1])
    assert_close(after[1], last[1])
    begin = 0
    for end in (5, 16, 19):
        before = state if begin == 0 else jnp.zeros_like(state)
        wanted, last = token_by_token(tuple(each[:, begin:end] for each in arrays), before)  # type: ignore[arg-type]
        assert_close(out[0, begin:end], wanted[0])
        begin = end
    assert_close(after[0], last[0])


def test_tokens_of_padding_leave_the_state() -> None:
    x, decay, b, c = inputs(12)
    valid = jnp.arange(12) < 7
    arrays = (jnp.where(valid[:, None, None, None], x, 0), jnp.where(valid[:, None, None], decay, 0), b, c)
    _, after = chunked(*arrays, some_state(), chunk=8)
    _, wanted = token_by_token(tuple(each[:, :7] for each in arrays), some_state())  # type: ignore[arg-type]
    assert_close(after, wanted)


def test_a_small_decay_after_large_ones_is_exact() -> None:
    # Differences of running sums would be multiples of 2**-13 here.
    values = jnp.asarray([-1e3, -1e3, -1e-5, -1e-5], jnp.float32)
    sums = segment_sums(values)
    np.testing.assert_allclose(sums[3, 1:], [-2e-5, -1e-5, 0.0], rtol=1e-6)
    assert np.isneginf(np.asarray(sums)[np.triu_indices(4, 1)]).all()


@pytest.mark.torch
def test_values_and_gradients_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    arrays, state, rates = inputs(40), some_state(), -np.arange(1.0, 7.0, dtype=np.float32)
    x, dt, b, c = arrays[0], -arrays[1], *arrays[2:]

    def ours(x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return chunked_state_space(x * dt[..., None], dt * rates.reshape(GROUPS, HEADS), b, c, state, chunk=16)

    leaves = [torch.tensor(np.asarray(each), requires_grad=True) for each in (x, dt, b, c, state)]
    heads = [leaf.flatten(2, 3) for leaf in leaves[:2]] + leaves[2:4]
    wanted, last = mamba2_chunk_scan(
        heads[0],
        heads[1],
        torch.tensor(rates),
        *heads[2:],
        chunk_size=8,
        initial_states=leaves[4].flatten(1, 2),
        return_final_states=True,
    )
    out, after = jax.jit(ours)(x, dt, b, c, state)
    assert_close(out, wanted.detach().numpy().reshape(out.shape))
    assert_close(after, last.detach().numpy().reshape(after.shape))
    ((wanted**2).sum() + last.sum()).backward()
    gradients = jax.jit(
        jax.grad(lambda *each: (ours(*each)[0] ** 2).sum() + ours(*each)[1].sum(), argnums=tuple(range(5)))
    )(x, dt, b, c, state)
    for mine, leaf in zip(gradients, leaves, strict=True):
        assert_close(mine, leaf.grad.numpy(), 1e-4)
