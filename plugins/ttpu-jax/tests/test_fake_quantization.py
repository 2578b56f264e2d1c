"""Training that is aware of quantization multiplies what the quantized model will; its gradients reach the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.ops.fake_quantization import fake_quantize, fake_quantize_activations
from ttpu_jax.ops.kernels import dense, quantize
from ttpu_jax.ops.matmul import quantized_matmul

SCHEMES = ("w8a16", "w4a16-g16-asym", "w8a8", "w8a8-fp8", "mxfp4")


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def product(x: jax.Array, kernel: jax.Array, form: KernelFormat) -> jax.Array:
    if form.activation is not None:
        x = fake_quantize_activations(x, form.activation)
    return x @ fake_quantize(kernel, form).T


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rounded_product_is_that_of_the_quantized_kernel(scheme: str) -> None:
    form = QuantizationConfig.parse(scheme).kernel_format
    x, kernel = random(3, 64), random(8, 64, seed=1)
    held = quantize(kernel, form)
    np.testing.assert_array_equal(fake_quantize(kernel, form), dense(held))
    assert np.abs(np.asarray(fake_quantize(kernel, form)) - np.asarray(kernel)).max() > 1e-4
    np.testing.assert_allclose(product(x, kernel, form), quantized_matmul(x, held), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_reach_weights_and_activations_as_if_nothing_were_rounded(scheme: str) -> None:
    form = QuantizationConfig.parse(scheme).kernel_format
    x, kernel, weight = random(3, 64), random(8, 64, seed=1), random(3, 8, seed=2)
    to_x, to_kernel = jax.grad(lambda x, kernel: (product(x, kernel, form) * weight).sum(), argnums=(0, 1))(x, kernel)
    rounded = x if form.activation is None else fake_quantize_activations(x, form.activation)
    np.testing.assert_allclose(to_kernel, weight.T @ rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_x, weight @ fake_quantize(kernel, form), rtol=1e-5, atol=1e-5)


def test_steps_on_rounded_weights_make_the_quantized_model_fit() -> None:
    """Descending on the rounded product fits a target better than rounding what was fitted without it."""
    form = QuantizationConfig.parse("w4a16-g16").kernel_format
    x, target = random(256, 8) @ random(8, 32, seed=4) + 0.1 * random(256, 32, seed=5), random(256, 4, seed=3)
    fitted = jnp.asarray(np.linalg.lstsq(np.asarray(x), np.asarray(target), rcond=None)[0].T)

    def loss(kernel: jax.Array) -> jax.Array:
        return ((product(x, kernel, form) - target) ** 2).mean()

    step = jax.jit(lambda kernel: kernel - 0.005 * jax.grad(loss)(kernel))
    kernel, least = fitted, float(loss(fitted))
    for _ in range(60):
        kernel = step(kernel)
        least = min(least, float(loss(kernel)))
    exact = float(((x @ fitted.T - target) ** 2).mean())
    assert least - exact < 0.8 * (float(loss(fitted)) - exact)
