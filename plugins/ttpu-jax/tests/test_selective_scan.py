"""The selective scan of Mamba agrees with transformers', in values and gradients, however it is cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_jax.ops.selective_scan import selective_scan

BATCH, CHANNELS, SIZE = 2, 6, 5
scan: Any = jax.jit(selective_scan, static_argnames="chunk")
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def inputs(seq: int) -> Inputs:
    """x, dt, rates, b, c."""
    random = np.random.default_rng(0)
    x, dt, b, c = (
        jnp.asarray(random.normal(size=(BATCH, seq, last)), jnp.float32) for last in (CHANNELS, CHANNELS, SIZE, SIZE)
    )
    return x, jnp.abs(dt), -jnp.arange(1.0, SIZE * CHANNELS + 1).reshape(SIZE, CHANNELS) / 8, b, c


def cut(arrays: Inputs, start: int, stop: int) -> Inputs:
    x, dt, rates, b, c = arrays
    return x[:, start:stop], dt[:, start:stop], rates, b[:, start:stop], c[:, start:stop]


def some_state() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, SIZE, CHANNELS)), jnp.float32)


def assert_close(ours: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=tolerance * float(np.abs(wanted).max()))


def test_chunks_and_single_tokens_give_the_same() -> None:
    arrays, state = inputs(19), some_state()
    wanted, last = scan(*arrays, state, chunk=8)
    out, after = scan(*arrays, state, chunk=64)
    assert_close(out, wanted)
    assert_close(after, last)
    for token in range(19):
        out, state = scan(*cut(arrays, token, token + 1), state)
        assert_close(out[:, 0], wanted[:, token])
    assert_close(state, last)


def test_a_sequence_that_starts_within_a_row_sees_nothing_before_it() -> None:
    arrays, state = inputs(19), some_state()
    starts = jnp.zeros((BATCH, 19), bool).at[0, 5].set(True)  # the second row goes on
    out, after = scan(*arrays, state, chunk=8, starts=starts)
    whole, last = scan(*arrays, state)
    new, new_last = scan(*cut(arrays, 5, 19), jnp.zeros_like(state))
    assert_close(out[1], whole[1])
    assert_close(out[0, 5:], new[0])
    assert_close(after, jnp.stack([new_last[0], last[1]]))


@pytest.mark.torch
def test_values_and_gradients_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    arrays = inputs(21)
    leaves = [torch.tensor(np.asarray(each), requires_grad=True) for each in arrays]
    x, dt, rates, b, c = leaves
    turned = [each.transpose(1, 2) for each in (x, dt, b, c)]
    wanted, last = mamba_selective_scan(turned[0], turned[1], rates.T, *turned[2:], return_last_state=True)

    def ours(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, dt, rates, b, c = arrays
        return selective_scan(x, dt, rates, b, c, jnp.zeros((BATCH, SIZE, CHANNELS)), chunk=8)

    out, after = jax.jit(ours)(*arrays)
    assert_close(out, wanted.detach().numpy().swapaxes(1, 2))
    assert_close(after, last.detach().numpy().swapaxes(1, 2))
    ((wanted**2).sum() + last.sum()).backward()
    gradients = jax.jit(
        jax.grad(lambda *each: (ours(*each)[0] ** 2).sum() + ours(*each)[1].sum(), argnums=tuple(range(5)))
    )(*arrays)
    for mine, leaf in zip(gradients, leaves, strict=True):
        assert_close(mine, leaf.grad.numpy(), 1e-4)
