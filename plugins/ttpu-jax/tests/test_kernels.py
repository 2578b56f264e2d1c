"""A kernel may be dense, quantized or adapted: products dispatch on its type, and give what the dense kernel that it
stands for gives, within what rounding explains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.spec import axes
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.grouped import grouped_linear
from ttpu_jax.ops.kernels import LowRankKernel, QuantizedKernel, dense, map_arrays, quantize, with_adapters
from ttpu_jax.ops.linear import linear
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement

SHAPE = (3, 8, 64)  # [*out, in]
FLOAT32_EPS, BFLOAT16_EPS = 2.0**-24, 2.0**-8  # of one rounding
TOKENS = np.random.default_rng(0).integers(0, 259, (2, 12)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(12, dtype=np.int32), TOKENS.shape)
KERNELS = ("qkv.kernel", "output.kernel", "gate_up.kernel", "down.kernel")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product_error(x: np.ndarray, kernel: QuantizedKernel, out: Any, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Distance from the float64 product of the dequantized operands, and how far roundings of `eps` can bring it: of
    the result once, and float32 sums of as many terms as there are inputs."""
    wide_x, values = x.astype(np.float64), np.asarray(kernel.values, np.float64)
    scale = np.asarray(kernel.scale, np.float64)
    exact = np.einsum("ri,abi->rab", wide_x, values * scale[..., None])
    terms = np.einsum("ri,abi->rab", np.abs(wide_x), np.abs(values) * scale[..., None])
    bound = eps * np.abs(exact) + (x.shape[1] + 4) * FLOAT32_EPS * terms
    return np.abs(np.asarray(out, np.float64) - exact), bound


def test_a_quantized_weight_is_at_most_half_a_scale_from_where_it_was() -> None:
    kernel = random(*SHAPE)
    kernel[1, 2] = 0.0
    quantized = quantize(jnp.asarray(kernel))
    assert quantized.values.dtype == jnp.int8 and quantized.scale.shape == SHAPE[:-1] and quantized.shape == SHAPE
    error = np.abs(np.asarray(dense(quantized)) - kernel)
    assert (error <= np.asarray(quantized.scale)[..., None] * (0.5 + 1e-4)).all()
    assert np.abs(np.asarray(quantized.values)).max() == 127
    np.testing.assert_array_equal(np.asarray(dense(quantized))[1, 2], 0.0)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, FLOAT32_EPS), (ml_dtypes.bfloat16, BFLOAT16_EPS)])
def test_a_quantized_product_is_that_of_the_dequantized_operands(
    dtype: Any, eps: float, rows: int, flatten: bool
) -> None:
    x, kernel = random(rows, SHAPE[-1], seed=1).astype(dtype), quantize(jnp.asarray(random(*SHAPE)))
    out = jax.jit(partial(linear, flatten=flatten))(x, kernel)
    error, bound = product_error(x, kernel, out, eps)
    assert out.dtype == dtype and (error <= bound).all()
    widened = linear(jnp.asarray(x), kernel, flatten=flatten, widen_rows=1)
    assert (product_error(x, kernel, widened, eps)[0] <= bound).all()


@pytest.mark.parametrize("cut", [(axes.KV_HEADS, None, None), (None, None, axes.MLP)], ids=["outputs", "inputs"])
def test_values_and_scales_are_sharded_by_the_kernels_axes(cut: tuple[str | None, ...]) -> None:
    placement = local_placement("tensor=8")
    kernel = quantize(jnp.asarray(random(8, 3, 64)))
    placed = map_arrays(kernel, cut, lambda a, ax: jax.device_put(a, placement.sharding(ax, a.shape, "a kernel")))
    assert placed.values.addressable_shards[0].data.size * 8 == kernel.values.size
    assert placed.scale.addressable_shards[0].data.shape == ((1, 3) if cut[0] else (8, 3))
    x = random(4, 64, seed=1)
    out = jax.jit(partial(linear, flatten=False))(x, placed)
    error, bound = product_error(x, kernel, out, FLOAT32_EPS)
    assert (error <= bound).all()


def test_gradients_go_through_a_quantized_kernel_to_its_input() -> None:
    x, kernel = jnp.asarray(random(4, SHAPE[-1], seed=1)), quantize(jnp.asarray(random(*SHAPE)))
    through = [
        jax.jit(jax.grad(lambda x, kernel=kernel: jnp.sin(linear(x, kernel)).sum()))(x)
        for kernel in (kernel, dense(kernel))
    ]
    np.testing.assert_allclose(*through, rtol=1e-4, atol=1e-5)


def test_grouped_products_dispatch_on_the_kernel() -> None:
    x, kernels = random(10, 16, seed=1), quantize(jnp.asarray(random(4, 2, 6, 16)))
    sizes = jnp.asarray([3, 0, 5, 2], jnp.int32)
    out = jax.jit(partial(grouped_linear, platform="cpu"))(x, kernels, sizes)
    whole = np.asarray(dense(kernels), np.float64).reshape(4, 12, 16)
    group = np.repeat(np.arange(4), sizes)
    np.testing.assert_allclose(out, np.einsum("ri,roi->ro", x, whole[group]), rtol=1e-5, atol=1e-5)
    to_x = [
        jax.grad(lambda x, kernels=kernels: jnp.sin(grouped_linear(x, kernels, sizes, "cpu")).sum())(jnp.asarray(x))
        for kernels in (kernels, dense(kernels))
    ]
    np.testing.assert_allclose(*to_x, rtol=1e-4, atol=1e-5)


def test_adapters_add_to_a_quantized_base_what_they_add_to_a_dense_one() -> None:
    x, base = jnp.asarray(random(6, 64, seed=1)), quantize(jnp.asarray(random(*SHAPE)))
    a, b = jnp.asarray(random(2, 4, 64, seed=2)), jnp.asarray(random(3, 8, 2, 4, seed=3))
    ids = jnp.asarray([0, 1, 2, 0, 2, 1], jnp.int32)
    run = jax.jit(lambda kernel, ids: linear(x, with_adapters(kernel, ids)))
    both = [run(LowRankKernel(kernel, a, b), ids) for kernel in (base, dense(base))]
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(both[0][0], linear(x, base)[0])  # token 0 has no adapter
    exact = np.asarray(linear(x, base))[1] + np.asarray(b)[:, :, 0] @ (np.asarray(a)[0] @ np.asarray(x)[1])
    np.testing.assert_allclose(both[0][1], exact, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(
        tmp_path_factory.mktemp("kernels") / "llama",
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=264,  # eight devices share the table
    )


def model_and_params(path: Path, mesh: str | None = None) -> tuple[DecoderModel, dict[str, Any]]:
    checkpoint = open_checkpoint(path)
    architecture = default_registry().architecture(checkpoint.config)
    placement, spec = local_placement(mesh), architecture.spec
    params = load_parameters(checkpoint, architecture.mapping, spec.parameters, placement, np.dtype(np.float32))
    return causal_model(spec, Runtime(placement, ropes=different_ropes(spec.layers))), params


def quantized(params: dict[str, Any]) -> dict[str, Any]:
    return {path: jax.jit(quantize)(value) if path.endswith(KERNELS) else value for path, value in params.items()}


def test_a_decoder_of_quantized_kernels_gives_the_logits_of_the_dequantized_ones(llama: Path) -> None:
    """On one device and over eight; and near the model's own, by what half a scale in each weight makes of logits."""
    model, params = model_and_params(llama)
    held = quantized(params)
    assert sum(isinstance(value, QuantizedKernel) for value in held.values()) == 8
    run = jax.jit(lambda params: model.forward(params, TOKENS, POSITIONS)[0])
    ours, theirs = run(held), run({path: dense(value) for path, value in held.items()})
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    original = run(params)
    assert 0 < np.abs(ours - original).max() < 0.05 * np.abs(original).max()
    over, cut = model_and_params(llama, "fsdp=2,tensor=4")
    spread = jax.jit(lambda params: over.forward(params, TOKENS, POSITIONS)[0])(quantized(cut))
    np.testing.assert_allclose(spread, ours, atol=2e-5 * np.abs(theirs).max())
