"""Moments of 8 bits: their codes are the paper's, and training with them is close to AdamW's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ttpu_core.spec import Parameter, axes
from ttpu_jax.train import adam_8bit
from ttpu_jax.train.adam_8bit import BLOCK, Blocks
from ttpu_jax.train.optimizers import optimizer_for
from ttpu_train.runner import OptimizerSettings

SHAPE = (48, 2 * BLOCK + 88)  # the last block is short
TABLE = {
    "mlp.kernel": Parameter(SHAPE, (axes.EMBED, axes.MLP)),
    "norm.scale": Parameter((48,), (axes.NORM,)),
}
encode, decode = jax.jit(adam_8bit.encode, static_argnames="signed"), jax.jit(adam_8bit.decode)


def dynamic_map(signed: bool) -> np.ndarray:
    """The numbers of bitsandbytes' `create_dynamic_map(signed, 7, 8)`."""
    data = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        data += [*means, *(-means if signed else ())]
    return np.sort(data)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_paper_and_the_nearest(signed: bool) -> None:
    every = np.arange(-128, 128).astype(np.int8) if signed else np.arange(256).astype(np.uint8)
    values = decode(Blocks(jnp.asarray(every), jnp.ones(1)))
    np.testing.assert_allclose(np.sort(values), dynamic_map(signed), rtol=2e-6)
    random = np.random.default_rng(0)
    given = (random.standard_normal(SHAPE) * 10.0 ** random.uniform(-4, 0, SHAPE)).astype(np.float32)
    given = given if signed else np.abs(given)
    held = encode(jnp.asarray(given), signed=signed)
    assert held.codes.shape == SHAPE and held.scales.shape == (48, 3) and held.codes.dtype.itemsize == 1
    np.testing.assert_array_equal(held.scales[:, 0], np.abs(given[:, :BLOCK]).max(1))
    scales = np.repeat(held.scales, BLOCK, axis=1)[:, : SHAPE[1]]
    nearest = np.abs(dynamic_map(signed)[:, None, None] * scales - given).min(0)
    error = np.abs(np.asarray(decode(held)) - given)
    assert (error <= nearest + 4e-7 * scales).all()


def test_small_second_moments_are_not_rounded_to_zero() -> None:
    given = jnp.asarray([1.0, 1e-12, 0.0, 0.5])
    values = np.asarray(decode(encode(given, signed=False)))
    assert values[0] == 1 and 0 < values[1] < 1e-6 and values[2] == 0
    assert np.asarray(decode(encode(jnp.zeros(4), signed=True))).tolist() == [0] * 4


def trained(name: str) -> tuple[float, Any]:
    """The loss of a regression after some updates, and the optimizer's state."""
    random = np.random.default_rng(1)
    inputs = jnp.asarray(random.standard_normal((64, SHAPE[1])), jnp.float32)
    wanted = inputs @ jnp.asarray(random.standard_normal(SHAPE), jnp.float32).T
    optimizer = optimizer_for(OptimizerSettings(name, beta2=0.95), TABLE)
    params = {"mlp.kernel": jnp.zeros(SHAPE), "norm.scale": jnp.ones(48)}

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(inputs @ params["mlp.kernel"].T * params["norm.scale"] - wanted))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda update: -0.02 * update, updates)), state, value

    state, value = optimizer.init(params), None
    for _ in range(40):
        params, state, value = step(params, state)
    return float(value), state  # type: ignore[arg-type]


def test_training_is_close_to_adamw_with_a_quarter_of_its_state() -> None:
    (exact, whole), (rounded, held) = trained("adamw"), trained("adamw_8bit")
    assert exact < 5 and rounded == pytest.approx(exact, rel=0.05)  # from 600
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in (whole, held)]
    assert sizes[1] < 0.27 * sizes[0]
    assert isinstance(held.mu["mlp.kernel"], Blocks) and held.nu["norm.scale"].dtype == jnp.float32
