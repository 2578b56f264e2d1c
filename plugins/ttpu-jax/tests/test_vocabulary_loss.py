"""The loss of devices that divide the vocabulary is that of one device, with its gradients, and moves the head once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_padded import GQA

from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, NormSpec
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.loss import TokenBatch, summed_loss
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.kernels import quantize
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement
from ttpu_train.runner import LossSettings

NORM = NormSpec()
SPEC = ArchitectureSpec(
    "tiny", EmbeddingSpec(61, 16), (LayerSpec(replace(GQA, num_heads=4, num_kv_heads=2), MLPSpec(8), NORM),),
    NORM, HeadSpec(), 16,
)  # fmt: skip
RANDOM = np.random.default_rng(0)
TOKENS = jnp.asarray(RANDOM.integers(0, 61, (8, 11)), jnp.int32)
POSITIONS = jnp.where(jnp.arange(11) < 9 + jnp.arange(8)[:, None] % 3, jnp.arange(11), -1)
WEIGHTS = jnp.asarray(RANDOM.uniform(0.5, 2, (8, 11)), jnp.float32) * (RANDOM.uniform(size=(8, 11)) < 0.7)
BATCH = TokenBatch(TOKENS, WEIGHTS * (POSITIONS >= 0), POSITIONS)
SMOOTHED = LossSettings(label_smoothing=0.2, z_loss=0.05, tokens_at_once=4)


def model_of(spec: ArchitectureSpec, mesh: str | None, dtype: Any = np.float32) -> tuple[DecoderModel, dict[str, Any]]:
    placement = local_placement(mesh)
    model = causal_model(spec, Runtime(placement, ropes=different_ropes(spec.layers)))
    whole = replace(spec, embedding=replace(spec.embedding, table_rows=None)).parameters
    values: dict[str, Any] = random_parameters(whole, local_placement(), np.dtype(np.float32))
    for path in (*model.head_paths, "embed.embedding"):
        value = 8 * np.asarray(values[path]) if path in model.head_paths else np.asarray(values[path])
        missing = model.parameters[path].shape[0] - len(value)
        values[path] = jnp.asarray(np.pad(value, ((0, missing), *((0, 0),) * (value.ndim - 1))))
    return model, {path: jax.device_put(a.astype(dtype), model.placements[path]) for path, a in values.items()}


def of_formulas(spec: ArchitectureSpec, settings: LossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The minimized sum on one device, and its gradients, from the logits of all tokens at once."""
    model, params = model_of(spec, None)

    def total(params: Any) -> jax.Array:
        logits = model.forward(params, TOKENS, POSITIONS)[0][:, :-1]
        log = jax.nn.log_softmax(logits)
        target = jax.nn.one_hot(TOKENS[:, 1:], logits.shape[-1])
        smooth, z = settings.label_smoothing, settings.z_loss
        loss = -((1 - smooth) * (log * target).sum(-1) + smooth * log.mean(-1))
        return ((loss + z * jax.nn.logsumexp(logits, axis=-1) ** 2) * BATCH.weights[:, 1:]).sum()

    return jax.jit(jax.value_and_grad(total))(params)


def of_parts(
    spec: ArchitectureSpec, mesh: str | None, settings: LossSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    model, params = model_of(spec, mesh)
    found = jax.jit(jax.value_and_grad(lambda params: summed_loss(model, params, BATCH, settings).total))
    total, gradients = found(params)
    alone = jax.jit(lambda params: summed_loss(model, params, BATCH, settings).total)(params)
    np.testing.assert_allclose(alone, total, rtol=1e-6)  # without gradients
    return total, gradients


CASES = {
    "plain": (HeadSpec(), LossSettings(tokens_at_once=3)),
    "bias, smoothing and z": (HeadSpec(bias=True), SMOOTHED),
    "tied, softcap and multiplier": (HeadSpec(tied=True, softcap=2.0, multiplier=0.7), SMOOTHED),
}


@pytest.mark.parametrize("mesh", [None, "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,sequence=2", "data=8"])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradients_are_those_of_the_formulas_on_one_device(case: str, mesh: str | None) -> None:
    head, settings = CASES[case]
    spec = replace(SPEC, head=head)
    if mesh is not None and "tensor" in mesh:  # rows of the table that are no words
        spec = replace(spec, embedding=replace(spec.embedding, table_rows=62))
    expected, theirs = of_formulas(replace(SPEC, head=head), settings)
    total, ours = of_parts(spec, mesh, settings)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for path, gradient in theirs.items():
        words = path.startswith(("embed.", "head."))
        found = np.asarray(ours[path])[: len(gradient)] if words else ours[path]
        np.testing.assert_allclose(found, gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=path)


def test_the_head_moves_once_and_its_gradient_once() -> None:
    """Compiled for eight devices, with the tokens in four parts: no device gathers a kernel, and what devices exchange
    within the loop over parts are tokens alone."""
    spec = replace(SPEC, embedding=EmbeddingSpec(4096, 16), layers=())
    model, params = model_of(spec, "fsdp=8")

    def total(params: Any) -> jax.Array:
        return summed_loss(model, params, BATCH, LossSettings(tokens_at_once=3)).total

    text = jax.jit(jax.grad(total)).lower(params).compile().as_text()
    exchanged = re.findall(r"= \(?f32\[([\d,]*)\]\S* (?:all-gather|all-reduce|reduce-scatter)\(", text)
    sizes = [np.prod([int(size) for size in shape.split(",") if size]) for shape in exchanged]
    assert sizes and max(sizes) < 4096 * 16 / 8
    assert len(re.findall(r" all-to-all\(", text)) >= 2


def test_a_quantized_head_has_no_gradient_and_the_stream_has_one() -> None:
    model, params = model_of(SPEC, None)
    other, kept = params["head.kernel"], {path: value for path, value in params.items() if path != "head.kernel"}
    kernel = quantize(other)

    def total(params: Any, head: Any) -> jax.Array:
        return summed_loss(model, {**params, "head.kernel": head}, BATCH, LossSettings(tokens_at_once=3)).total

    ours = jax.jit(jax.grad(total))(kept, kernel)
    theirs = jax.jit(jax.grad(total))(kept, kernel.values * kernel.scale[:, None])
    for path, gradient in theirs.items():
        np.testing.assert_allclose(ours[path], gradient, atol=1e-4 * np.abs(gradient).max(), err_msg=path)


def test_in_bfloat16_gradients_are_summed_in_float32() -> None:
    """The head's gradient over many parts is no further from float32's than over one."""
    _, exact = of_parts(SPEC, None, LossSettings(tokens_at_once=512))
    model, params = model_of(SPEC, "fsdp=8", jnp.bfloat16)

    def error(at_once: int) -> float:
        settings = LossSettings(tokens_at_once=at_once)
        found = jax.jit(jax.grad(lambda params: summed_loss(model, params, BATCH, settings).total))(params)
        assert found["head.kernel"].dtype == jnp.bfloat16
        return float(np.abs(np.asarray(found["head.kernel"], np.float32) - exact["head.kernel"]).mean())

    assert error(1) < 1.3 * error(512)
