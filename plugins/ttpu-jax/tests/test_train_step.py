"""A training step updates what it is told to, by the optimizer that it is given, however the batch is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_padded import LAYERS, architecture

from ttpu_core.errors import RequestError
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import ArchitectureSpec, LayerSpec
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import LossSums, TokenBatch, next_token_loss, token_batch
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import local_placement
from ttpu_jax.train.step import TrainStep, abstract_tokens, adamw

FLOAT32 = np.dtype(np.float32)
LAYER: LayerSpec = LAYERS["biases and sinks"]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 67, (8, 9)), jnp.int32)
REAL = jnp.ones(TOKENS.shape, bool).at[:3, 5:].set(False)  # rows of different lengths, in parts of different counts
STEPS = 3


def spec() -> ArchitectureSpec:
    return architecture(LAYER)


def make(mesh: str | None = None, **options: Any) -> tuple[TrainStep, dict[str, Any]]:
    placement = local_placement(mesh)
    padded, paddings = pad_for(spec(), placement)
    model = causal_model(padded, Runtime(placement, ropes=different_ropes(padded.layers)), remat="full")
    options = {"optimizer": optax.adam(1e-2, eps=1e-3)} | options
    whole = random_parameters(spec().parameters, local_placement(), FLOAT32)
    padded_values = {path: paddings[path].pad(np.asarray(a)) if path in paddings else a for path, a in whole.items()}
    params = {path: jax.device_put(value, model.placements[path]) for path, value in padded_values.items()}
    return TrainStep(model, FLOAT32, paddings, **options), params


def run(step: TrainStep, params: dict[str, Any], mask: jax.Array | None = REAL) -> tuple[list[float], dict[str, Any]]:
    state, update, losses = jax.jit(step.init)(params), jax.jit(step), []
    for _ in range(STEPS):
        params, state, figures = update(params, state, token_batch(TOKENS, mask))
        losses.append(float(figures.loss))
    return losses, params


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_allclose(value, theirs[path], atol=2e-5, err_msg=path)


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Any]]:
    return run(*make())


def test_steps_are_those_of_optax_done_by_hand(plain: tuple[list[float], dict[str, Any]]) -> None:
    step, params = make()
    state, losses = step.optimizer.init(params), []
    gradient = jax.jit(jax.value_and_grad(lambda params: next_token_loss(step.model, params, TOKENS, REAL)))
    for _ in range(STEPS):
        loss, gradients = gradient(params)
        updates, state = step.optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    np.testing.assert_allclose(plain[0], losses, rtol=1e-5)
    assert_equal(plain[1], params)


def test_a_batch_in_parts_gives_the_losses_and_parameters_of_the_whole(
    plain: tuple[list[float], dict[str, Any]],
) -> None:
    losses, params = run(*make(accumulation=4))
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    assert_equal(params, plain[1])


@pytest.mark.parametrize("parts", [1, 2])
def test_eight_devices_train_as_one_does(plain: tuple[list[float], dict[str, Any]], parts: int) -> None:
    step, params = make("fsdp=2,data=2,tensor=2", accumulation=parts)
    losses, after = run(step, params)
    np.testing.assert_allclose(losses, plain[0], rtol=1e-5)
    found = {path: np.asarray(value) for path, value in after.items()}
    assert_equal({p: step.paddings[p].unpad(a) if p in step.paddings else a for p, a in found.items()}, plain[1])
    assert all(after[path].sharding.is_equivalent_to(params[path].sharding, params[path].ndim) for path in after)


def test_what_is_not_trained_stays_bit_for_bit_and_has_no_optimizer_state() -> None:
    step, params = make(trainable=lambda path: path.endswith("norm.scale") or "mlp" in path, accumulation=2)
    losses, after = run(step, params)
    moved = {path for path, value in after.items() if not np.array_equal(value, params[path])}
    assert moved == {path for path in params if step.trainable(path)} and 0 < len(moved) < len(params)
    assert losses[-1] < losses[0]
    assert set(step.init(params)[0].mu) == moved


def test_the_loss_is_an_argument() -> None:
    def sizes(model: Any, params: Any, batch: TokenBatch) -> LossSums:
        total = jnp.asarray(sum(jnp.square(value).sum() for value in params.values()))
        return LossSums(total, total, jnp.float32(1), jnp.float32(0))

    step, params = make(loss=sizes, optimizer=optax.sgd(0.25))
    _, after = run(step, params, None)
    for path, value in params.items():  # each step leaves a half of it
        np.testing.assert_allclose(after[path], value / 2**STEPS, rtol=1e-6)


def test_rows_that_do_not_divide_are_refused_with_what_to_change() -> None:
    step, params = make(accumulation=3)
    with pytest.raises(RequestError, match=r"8 rows was to be computed in 3 parts.*multiple of 3"):
        jax.eval_shape(step, params, jax.eval_shape(step.init, params), token_batch(TOKENS))


def test_the_training_state_says_what_the_step_holds() -> None:
    """Bytes of master weights, of AdamW's moments and of gradients, counted from the arrays."""
    step, params = make("fsdp=4,tensor=2", optimizer=adamw())
    state = step.abstract_state({path: _like(array) for path, array in params.items()})
    elements = sum(value.size for value in params.values())
    held = [leaf for leaf in (*params.values(), *jax.tree.leaves(state)) if leaf.ndim]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in held) == elements * ADAMW.held_bytes
    assert ADAMW.bytes_per_parameter == 16
    assert {leaf.sharding for leaf in held} <= {value.sharding for value in params.values()}
    assert abstract_tokens(8, 9, step.model.runtime.placement).sharding.shard_shape((8, 9)) == (2, 9)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
