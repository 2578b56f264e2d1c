"""The loss is the mean cross-entropy of every real next token, however it is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.loss import next_token_loss, summed_next_token_loss
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 259, (3, 21)))
REAL = np.ones(TOKENS.shape, bool)
REAL[0, :4] = False  # padding before
REAL[1, 15:] = False  # and after


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A function that makes the model, and the parameters."""
    checkpoint = open_checkpoint(llama_checkpoint(tmp_path_factory.mktemp("loss") / "llama"))
    architecture = default_registry().architecture(checkpoint.config)
    spec, placement = architecture.spec, local_placement()
    params = load_parameters(checkpoint, architecture.mapping, spec.parameters, placement, np.dtype(np.float32))
    runtime = Runtime(placement, ropes=different_ropes(spec.layers))

    def make(*, remat: bool = False) -> DecoderModel:
        return causal_model(spec, runtime, remat=remat)

    return make, params


def plain_loss(model: DecoderModel, params: Any, tokens: jax.Array, mask: np.ndarray) -> jax.Array:
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1)
    log_probabilities = jax.nn.log_softmax(model.forward(params, tokens, positions)[0][:, :-1])
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)[..., 0]
    counted = mask[:, 1:] & mask[:, :-1]
    return -(chosen * counted).sum() / counted.sum()


@pytest.mark.parametrize("at_once", [512, 8])
def test_the_loss_is_the_mean_over_real_next_tokens(model: tuple[Any, Any], at_once: int) -> None:
    make, params = model
    expected = plain_loss(make(), params, TOKENS, REAL)
    total, count = summed_next_token_loss(make(), params, TOKENS, jnp.asarray(REAL), tokens_at_once=at_once)
    assert count == (REAL[:, 1:] & REAL[:, :-1]).sum()
    np.testing.assert_allclose(total / count, expected, rtol=1e-5)
    np.testing.assert_allclose(next_token_loss(make(), params, TOKENS, jnp.asarray(REAL)), expected, rtol=1e-5)


def test_gradients_are_the_same_when_activations_are_computed_again(model: tuple[Any, Any]) -> None:
    make, params = model
    kept = jax.jit(jax.grad(lambda params: plain_loss(make(), params, TOKENS, REAL)))(params)
    again = jax.jit(
        jax.grad(lambda params: next_token_loss(make(remat=True), params, TOKENS, jnp.asarray(REAL)))
    )(params)
    for path, gradient in kept.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(again[path], gradient, atol=1e-5 * scale, err_msg=path)


@pytest.mark.slow
def test_gradients_of_stacked_layers_are_the_same_when_activations_are_computed_again(model: tuple[Any, Any]) -> None:
    """Of a pair of layers that occurs twice, and of a layer that occurs once."""
    spec = model[0]().spec
    layer = spec.layers[0]
    windowed = replace(layer, mixer=replace(layer.mixer, window=5))
    spec = replace(
        spec, layers=(windowed, layer, windowed, layer, replace(layer, mixer=replace(layer.mixer, window=7)))
    )
    assert [(len(group.unit), group.repeats) for group in spec.groups()] == [(2, 2), (1, 1)]
    table, placement = stacked_parameters(spec), local_placement()
    params = random_parameters(table, placement, np.dtype(np.float32))
    runtime = Runtime(placement, ropes=different_ropes(spec.layers))

    def gradients(*, remat: bool) -> Any:
        def loss(params: Any) -> jax.Array:
            return plain_loss(causal_model(spec, runtime, stacked=True, remat=remat), params, TOKENS, REAL)

        return jax.jit(jax.grad(loss))(params)

    kept, again = gradients(remat=False), gradients(remat=True)
    for path, gradient in kept.items():
        np.testing.assert_allclose(again[path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)
