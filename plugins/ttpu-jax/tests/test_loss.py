"""The loss is the mean cross-entropy of every real next token, however it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import ModelConfig, default_registry, open_checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.mapping import stack_layers
from ttpu_core.sharding.training_state import Recomputation
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.loss import (
    TokenBatch,
    next_token_loss,
    settings_for,
    summed_loss,
    summed_next_token_loss,
    token_parts,
)
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement
from ttpu_train.runner import LossSettings

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

    def make(*, remat: Recomputation = "none") -> DecoderModel:
        return causal_model(spec, runtime, remat=remat)

    return make, params


def plain_loss(model: DecoderModel, params: Any, tokens: jax.Array, mask: np.ndarray) -> jax.Array:
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1)
    log_probabilities = jax.nn.log_softmax(model.forward(params, tokens, positions)[0][:, :-1])
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)[..., 0]
    counted = mask[:, 1:] & mask[:, :-1]
    return -(chosen * counted).sum() / counted.sum()


def test_parts_of_a_row_are_of_one_size_with_little_added() -> None:
    assert token_parts(jnp.ones((2, 600, 3)), 512).shape == (2, 2, 300, 3)  # 1,024 tokens would cost 1.7 times as much
    assert token_parts(jnp.ones((2, 1024)), 512).shape == (2, 2, 512)
    np.testing.assert_array_equal(token_parts(jnp.arange(7.0)[None], 3).ravel(), [0, 1, 2, 3, 4, 5, 6, 0, 0])


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
        jax.grad(lambda params: next_token_loss(make(remat="full"), params, TOKENS, jnp.asarray(REAL)))
    )(params)
    for path, gradient in kept.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(again[path], gradient, atol=1e-5 * scale, err_msg=path)


def batch_of(mask: np.ndarray, weights: Any) -> TokenBatch:
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1)
    return TokenBatch(TOKENS, jnp.asarray(weights, jnp.float32), positions)


@pytest.mark.torch
def test_smoothing_is_that_of_torch_and_the_z_loss_that_of_its_formula(model: tuple[Any, Any]) -> None:
    import torch

    make, params = model
    weights = np.random.default_rng(1).uniform(0.5, 2, TOKENS.shape) * REAL
    batch = batch_of(REAL, weights)
    logits = np.asarray(make().forward(params, TOKENS, batch.positions)[0])[:, :-1]
    flat, targets = torch.tensor(logits).flatten(0, 1), torch.tensor(np.asarray(TOKENS[:, 1:])).flatten().long()

    def of_torch(smoothing: float) -> np.ndarray:
        losses = torch.nn.functional.cross_entropy(flat, targets, reduction="none", label_smoothing=smoothing)
        return losses.reshape(logits.shape[:2]).numpy()

    squared = np.square(np.log(np.exp(logits.astype(np.float64)).sum(-1)))
    counted = weights[:, 1:]
    settings = LossSettings(label_smoothing=0.2, z_loss=0.05, tokens_at_once=8)
    sums = jax.jit(lambda params: summed_loss(make(), params, batch, settings))(params)
    np.testing.assert_allclose(sums.weight, counted.sum(), rtol=1e-6)
    np.testing.assert_allclose(sums.cross_entropy, (of_torch(0.0) * counted).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.total, ((of_torch(0.2) + 0.05 * squared) * counted).sum(), rtol=1e-5)
    right = logits.argmax(-1) == np.asarray(TOKENS[:, 1:])
    np.testing.assert_allclose(sums.correct, (right * counted).sum(), rtol=1e-5)


EXPERTS = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 12, "norm_topk_prob": True}),
    ],
)
def test_the_balance_of_experts_is_that_of_transformers(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """The loss, and its gradient for each parameter; mixtral in a scan over its layers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**EXPERTS, **sizes)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in theirs.parameters():  # so that experts are chosen unevenly
        parameter.data.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "weights")
    tokens, mask = np.asarray(TOKENS) % EXPERTS["vocab_size"], np.ones(TOKENS.shape, bool)
    mask[1, 15:] = False
    given = torch.tensor(tokens).long()
    labels = torch.where(torch.from_numpy(mask), given, -100)
    loss = theirs(given, attention_mask=torch.from_numpy(mask).long(), labels=labels).loss
    loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")

    checkpoint = open_checkpoint(tmp_path / "weights")
    architecture = default_registry().architecture(checkpoint.config)
    spec, placement, stacked = architecture.spec, local_placement(), family == "Mixtral"
    model = causal_model(spec, Runtime(placement, ropes=different_ropes(spec.layers)), stacked=stacked, remat=stacked)
    mapping = stack_layers(architecture.mapping, spec) if stacked else architecture.mapping

    def read(name: str) -> Any:
        checkpoint = open_checkpoint(tmp_path / name)
        return load_parameters(checkpoint, mapping, model.parameters, placement, np.dtype(np.float32))

    settings = settings_for(LossSettings(), checkpoint.config)
    assert settings.router_aux_loss == 0.3
    batch = replace(batch_of(mask, mask), tokens=jnp.asarray(tokens))

    def mean(params: Any) -> jax.Array:
        sums = summed_loss(model, params, batch, settings)
        return sums.total / sums.weight

    found, gradients = jax.jit(jax.value_and_grad(mean))(read("weights"))
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    for path, gradient in read("gradients").items():
        np.testing.assert_allclose(gradients[path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


def test_a_balance_of_experts_is_asked_of_models_that_have_some(model: tuple[Any, Any]) -> None:
    make, params = model
    plain = ModelConfig.from_dict({"model_type": "mixtral", "router_aux_loss_coef": 0.1})
    assert settings_for(LossSettings(), plain).router_aux_loss == 0.0
    assert settings_for(LossSettings(router_aux_loss=0.5), plain).router_aux_loss == 0.5
    with pytest.raises(RequestError, match="this llama model has no routers"):
        summed_loss(make(), params, batch_of(REAL, REAL), LossSettings(router_aux_loss=0.5))


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

    def gradients(*, remat: Recomputation) -> Any:
        def loss(params: Any) -> jax.Array:
            return plain_loss(causal_model(spec, runtime, stacked=True, remat=remat), params, TOKENS, REAL)

        return jax.jit(jax.grad(loss))(params)

    kept, again = gradients(remat="none"), gradients(remat="full")
    for path, gradient in kept.items():
        np.testing.assert_allclose(again[path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)
