"""A Pallas product on a mesh equals that with the whole dequantized kernel, and the choice of Pallas has a reason."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ttpu_core import ModelConfig, default_registry
from ttpu_core.quantization import QuantizationConfig, quantize_spec
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat
from ttpu_jax.ops.kernels import dense, quantize
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.matmul.choice import product_choices
from ttpu_jax.ops.matmul.devices import Devices
from ttpu_jax.ops.matmul.pallas import why_not_pallas

GROUPS = KernelFormat("int4", 32, symmetric=False)


@pytest.mark.parametrize("sharded", ["outputs", "inputs"])
def test_devices_multiply_by_their_own_shards(sharded: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    by_kernel = ((), ("tensor",), ()) if sharded == "outputs" else ((), (), ("tensor",))
    devices = Devices("tpu-interpreted", mesh, by_kernel, (("data",), ()))
    rng = np.random.default_rng(0)
    kernel = quantize(jnp.asarray(rng.normal(size=(2, 8, 128)), jnp.float32), GROUPS)
    x, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 128), (2, 8)))
    found = jax.jit(lambda x: linear(x, kernel, bias, flatten=False, devices=devices))(x)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(dense(kernel), np.float64), (-1, -1)) + np.asarray(bias)
    np.testing.assert_allclose(np.asarray(found), exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_auto_takes_the_kernel_for_groups_on_a_tpu() -> None:
    tpu = Devices("tpu-interpreted")
    assert why_not_pallas(GROUPS, (64, 256), 8, tpu) is None
    assert why_not_pallas(GROUPS, (64, 256), 4096, tpu) == "with more than 512 rows XLA is faster for groups of 32"
    integers = replace(GROUPS, activation=ActivationFormat("int8"))
    assert why_not_pallas(integers, (64, 256), 512, tpu) == "with more than 64 rows XLA is faster for integers"
    assert "scales per channel" in str(why_not_pallas(KernelFormat("int8"), (64, 256), 8, tpu))
    assert why_not_pallas(KernelFormat("int8"), (64, 256), 8, replace(tpu, use_pallas=True)) is None
    assert why_not_pallas(GROUPS, (64, 256), 8, replace(tpu, use_pallas=False)) == "use_pallas=False"
    assert why_not_pallas(GROUPS, (64, 256), 8, Devices("cpu")) == "the kernels are for TPUs"
    assert "whole registers" in str(why_not_pallas(KernelFormat("int4", 24), (64, 2400), 8, tpu))


def test_products_have_a_line_for_each_format_and_reason() -> None:
    config = {
        "model_type": "mixtral",
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    architecture = default_registry().architecture(ModelConfig.from_dict(config))
    spec = quantize_spec(architecture.spec, QuantizationConfig.parse("w4a16-g32"))
    kind = "products (int4, groups of 32)"
    words = product_choices(spec, "tpu", rows=(8, 4096))[kind]
    fall_back = "XLA: with more than 512 rows XLA is faster for groups of 32 (4,096 rows)"
    assert f"layers.*.attention.output.kernel: Pallas (8 rows), {fall_back}" in words
    assert "layers.*.moe.experts.down.kernel: Pallas: the values of the experts" in words
    halves = Parallelism((("data", 8), ("tensor", 2)))
    sharded = product_choices(spec, "tpu", parallelism=halves, rows=(8, 4096))[kind]
    assert "layers.*.attention.output.kernel: Pallas; " in sharded  # each device has 512 of the rows
    assert "the Pallas kernels are for TPUs" in product_choices(spec, "cpu")[kind]
    assert product_choices(architecture.spec, "tpu") == {}
