"""Products with quantized kernels of every format are those of the dequantized operands, within what the bit widths
explain, in every formulation; and their gradients are the dequantized kernel's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.quantization.rounding import round_kernel
from ttpu_core.spec import ActivationSpec, MoESpec, Parameter, axes
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.grouped import grouped_linear
from ttpu_jax.ops.kernels import (
    LowRankKernel,
    QuantizedKernel,
    dense,
    kernel_from_parts,
    map_arrays,
    quantize,
    with_adapters,
)
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.matmul import quantized_matmul, xla
from ttpu_jax.ops.matmul.dense import Product
from ttpu_jax.ops.matmul.devices import Devices
from ttpu_jax.ops.matmul.reference import reference
from ttpu_jax.ops.moe import ExpertKernels, run_experts
from ttpu_jax.params.placement import Placement, local_placement
from ttpu_jax.params.quantized import held_parts

INT8, FLOAT8 = ActivationFormat("int8"), ActivationFormat("float8_e4m3fn")
WEIGHTS = [
    KernelFormat(dtype, group, symmetric)
    for dtype in ("int8", "int4")
    for group in (None, 16)
    for symmetric in (True, False)
]
WEIGHTS += [KernelFormat("float8_e4m3fn"), KernelFormat("float8_e4m3fn", 16)]
MXFP4 = KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu")


def with_activation(form: KernelFormat, activation: ActivationFormat | None) -> KernelFormat:
    return KernelFormat(form.dtype, form.group_size, form.symmetric, form.scale_dtype, activation=activation)


ROWS = [with_activation(form, activation) for form in WEIGHTS for activation in (None, INT8)]
ROWS += [with_activation(KernelFormat("float8_e4m3fn", group), FLOAT8) for group in (None, 16)]
ROWS += [MXFP4, KernelFormat("int8", activation=ActivationFormat("int8", static=True))]
PATHS = [("cpu", True), ("tpu", True), ("tpu", False)]
"""Platform, and whether output dimensions are merged, as they are on one device. These run on a CPU all the same."""


def name(form: KernelFormat) -> str:
    weights = f"{form.dtype}-{form.group_size or 'channel'}{'' if form.symmetric else '-asymmetric'}"
    return f"{weights}-{form.activation.dtype if form.activation else 'weights-only'}"


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kernel_of(weights: np.ndarray, form: KernelFormat) -> QuantizedKernel:
    """Rounded by the reference, in a format that may have a static scale."""
    plain = with_activation(form, None)
    parts: dict[Any, Any] = {key: jnp.asarray(part) for key, part in round_kernel(weights, plain).items()}
    parts["values"], parts["scale"] = parts["values"].astype(form.dtype), parts["scale"].astype(form.scale_dtype)
    if form.activation is not None and form.activation.static:
        parts["input_scale"] = jnp.float32(0.02)
    return kernel_from_parts(form, parts)


def check(x: np.ndarray, kernel: QuantizedKernel, path: tuple[str, bool]) -> None:
    bias = random(*kernel.shape[:-1], seed=9)
    how = Product(x.dtype, path[1], platform=path[0])
    out = jax.jit(partial(xla.product, how=how))(x, kernel, bias)
    exact, bound = reference(x, kernel, bias)
    assert out.dtype == x.dtype and out.shape == exact.shape
    assert (np.abs(np.asarray(out).astype(np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("form", ROWS, ids=name)
def test_each_format_multiplies_within_its_bound(form: KernelFormat) -> None:
    weights, x = random(3, 7, 64), random(5, 64, seed=1)
    weights[1] = 0.0
    x[2], x[3, 7] = 0.0, 50.0
    kernel = kernel_of(weights, form)
    for path in PATHS[:2]:
        check(x.astype(ml_dtypes.bfloat16), kernel, path)


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(
    form=st.sampled_from(ROWS),
    path=st.sampled_from(PATHS),
    rows=st.sampled_from([1, 2, 130]),
    out=st.sampled_from([1, 5, 19]),
    groups=st.integers(1, 9),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    outlier=st.floats(0, 1e3, width=32),
)
def test_shapes_and_outliers_stay_within_the_bound(
    form: KernelFormat, path: Any, rows: int, out: int, groups: int, dtype: Any, outlier: float
) -> None:
    inputs = groups * (form.group_size or 13)
    weights, x = random(out, inputs, seed=rows), random(rows, inputs, seed=out)
    weights[0, 0], weights[-1], x[-1, -1] = outlier, 0.0, outlier
    check(x.astype(dtype), kernel_of(weights, form), path)


def test_a_tpu_multiplies_several_groups_at_a_time_by_aligned_slices() -> None:
    """The formulation of a loop over spans of groups, whole lanes wide, and its zero points."""
    for form in (KernelFormat("int4", 32, symmetric=False), KernelFormat("int8", 128, activation=INT8)):
        kernel = kernel_of(random(9, 512), form)
        text = str(
            jax.make_jaxpr(partial(xla.product, how=Product(jnp.float32, platform="tpu")))(random(3, 512), kernel, None)
        )
        assert "while" in text or "scan" in text
        check(random(3, 512, seed=1), kernel, ("tpu", True))
        check(random(130, 512, seed=1), kernel, ("tpu", True))


@pytest.mark.parametrize("form", [*WEIGHTS, MXFP4], ids=name)
def test_devices_round_as_the_reference_does(form: KernelFormat) -> None:
    weights = random(6, 96)
    weights[1], weights[2, 3] = 0.0, 30.0
    held = jax.jit(quantize, static_argnums=1)(weights, form)
    for part, expected in round_kernel(weights, form).items():
        np.testing.assert_array_equal(np.asarray(held.parts[part]).astype(np.float32), expected.astype(np.float32))


def test_columns_in_another_order_meet_their_features() -> None:
    weights, order = random(9, 64), np.random.default_rng(3).permutation(64).astype(np.int32)
    form = KernelFormat("int4", 16, symmetric=False, input_order=True)
    stored = kernel_of(weights[:, order], KernelFormat("int4", 16, symmetric=False))
    kernel = kernel_from_parts(form, {**stored.parts, "input_order": jnp.asarray(order)})
    x = random(4, 64, seed=1)
    check(x, kernel, ("cpu", True))
    np.testing.assert_allclose(quantized_matmul(x, kernel), x @ np.asarray(dense(kernel)).T, atol=1e-4)


@pytest.mark.parametrize(
    "form",
    [KernelFormat("int4", 16, symmetric=False), KernelFormat("int8", activation=INT8), MXFP4],
    ids=name,
)
def test_gradients_are_those_of_the_dequantized_kernel(form: KernelFormat) -> None:
    kernel, x, bias = kernel_of(random(3, 7, 64), form), random(4, 64, seed=1), random(3, 7, seed=2)
    weight = random(4, 3, 7, seed=3)
    run = jax.jit(jax.grad(lambda x, bias: (linear(x, kernel, bias) * weight).sum(), argnums=(0, 1)))
    exact = np.einsum("rab,abi->ri", weight, np.asarray(dense(kernel)))
    np.testing.assert_allclose(run(x, bias)[0], exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(x, bias)[1], weight.sum(0), rtol=1e-5)


def test_adapters_are_trained_on_a_frozen_quantized_base() -> None:
    """QLoRA: gradients of the adapters, and through the base to what comes before it."""
    base = kernel_of(random(8, 64), KernelFormat("int4", 16, symmetric=False))
    x, ids = random(6, 64, seed=1), jnp.asarray([0, 1, 1, 0, 1, 1], jnp.int32)

    def loss(x: jax.Array, a: jax.Array, b: jax.Array, base: Any) -> jax.Array:
        return jnp.sin(linear(x, with_adapters(LowRankKernel(base, a, b), ids))).sum()

    arguments = jnp.asarray(x), jnp.asarray(random(1, 4, 64, seed=2)), jnp.asarray(random(8, 1, 4, seed=3))
    ours, theirs = (
        jax.jit(jax.grad(partial(loss, base=each), argnums=(0, 1, 2)))(*arguments) for each in (base, dense(base))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cut", [(axes.KV_HEADS, None, None), (None, None, axes.MLP)], ids=["outputs", "inputs"])
def test_eight_devices_multiply_within_the_bound(cut: tuple[str | None, ...]) -> None:
    placement = local_placement("tensor=8")
    kernel, x = kernel_of(random(8, 3, 128), KernelFormat("int4", 16, symmetric=False)), random(4, 128, seed=1)
    placed = map_arrays(kernel, cut, lambda a, ax: jax.device_put(a, placement.sharding(ax, a.shape, "a kernel")))
    assert all(part.addressable_shards[0].data.size * 8 == part.size for part in placed.parts.values())
    exact, bound = reference(x, kernel)
    assert (np.abs(np.asarray(jax.jit(partial(linear, flatten=False))(x, placed), np.float64) - exact) <= bound).all()


BY_CHANNEL = [form for form in ROWS if form.activation is not None and form.group_size is None]
BY_CHANNEL += [KernelFormat("int8", symmetric=False)]


@pytest.mark.parametrize("form", BY_CHANNEL, ids=name)
def test_devices_that_share_the_inputs_scale_their_sums_before_they_exchange_them(form: KernelFormat) -> None:
    placement = local_placement("data=2,tensor=4")
    cut = None, None, axes.MLP
    kernel, x, bias = kernel_of(random(8, 3, 128), form), random(2, 4, 128, seed=1), random(8, 3, seed=2)
    placed = map_arrays(kernel, cut, lambda a, ax: jax.device_put(a, placement.sharding(ax, a.shape, "a kernel")))
    devices = Devices("tpu", placement.mesh, ((), (), ("tensor",)), (("data",), ()))
    run = jax.jit(partial(linear, flatten=False, platform="tpu", devices=devices))
    exact, bound = reference(x, kernel, bias)
    assert (np.abs(np.asarray(run(x, placed, bias), np.float64) - exact) <= bound).all()
    text = run.lower(x.astype(ml_dtypes.bfloat16), placed, bias).as_text()
    exchanged = re.findall(r"all_reduce.*?-> tensor<[\dx]+x(\w+)>", text, re.DOTALL)
    assert exchanged == ["bf16"]


@pytest.mark.parametrize(
    ("cut", "exchanges"), [((None, axes.MLP, None), "all_gather"), ((None, None, axes.MLP), "reduce_scatter")]
)
def test_devices_that_cut_the_stream_gather_integers_and_keep_their_rows(
    cut: tuple[str | None, ...], exchanges: str
) -> None:
    placement = local_placement("data=2,tensor=4")
    kernel, x = kernel_of(random(3, 8, 128), KernelFormat("int8", activation=INT8)), random(2, 16, 128, seed=1)
    placed = map_arrays(kernel, cut, lambda a, ax: jax.device_put(a, placement.sharding(ax, a.shape, "a kernel")))
    by_kernel = tuple(("tensor",) if axis else () for axis in cut)
    devices = Devices("tpu", placement.mesh, by_kernel, (("data",), ()), stream_axes=("tensor",))
    run = jax.jit(partial(linear, flatten=False, platform="tpu", devices=devices))
    exact, bound = reference(x, kernel)
    found = run(x, placed)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= bound).all()
    own = found.addressable_shards[0].data.shape
    assert own == ((1, 16, 3, 2) if exchanges == "all_gather" else (1, 4, 3, 8))
    text = run.lower(x.astype(ml_dtypes.bfloat16), placed).as_text()
    types = re.findall(rf"{exchanges}.*?-> tensor<[\dx]+x(\w+)>", text, re.DOTALL)
    assert types == (["i8", "f32"] if exchanges == "all_gather" else ["bf16"])


EXPERTS = [
    KernelFormat("int8", symmetric=False),
    KernelFormat("int4", 32, symmetric=False),
    KernelFormat("int8", 128, activation=INT8),
    KernelFormat("int4", 32, symmetric=False, activation=INT8),
    KernelFormat("float8_e4m3fn", activation=FLOAT8),
    MXFP4,
]


@pytest.mark.parametrize("platform", ["cpu", "tpu-interpreted"])
@pytest.mark.parametrize("form", EXPERTS, ids=name)
def test_experts_multiply_by_quantized_kernels(form: KernelFormat, platform: str) -> None:
    kernels, x = kernel_of(random(3, 2, 8, 256), form), random(12, 256, seed=1)
    sizes = np.asarray([5, 0, 7], np.int32)
    out = jax.jit(partial(grouped_linear, platform=platform))(x, kernels, sizes)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 12))):
        own = jax.tree.map(lambda part, expert=expert: part[expert], kernels)
        exact, bound = reference(x[rows], own)
        assert (np.abs(np.asarray(out[rows], np.float64) - exact.reshape(-1, 16)) <= bound.reshape(-1, 16)).all()


def test_a_tpu_multiplies_small_groups_of_experts_that_end_within_the_lanes() -> None:
    kernels, x = kernel_of(random(2, 8, 160), MXFP4), random(6, 160, seed=1)
    out = grouped_linear(x, kernels, jnp.asarray([0, 6], jnp.int32), "tpu-interpreted")
    exact, bound = reference(x, jax.tree.map(lambda part: part[1], kernels))
    assert (np.abs(np.asarray(out, np.float64) - exact) <= bound).all()


def test_codes_of_4_bit_floats_are_multiplied_like_their_numbers() -> None:
    numbers, x = kernel_of(random(2, 8, 256), MXFP4), random(6, 256, seed=1)
    codes = replace(numbers, values=jnp.asarray(np.asarray(numbers.values).view(ml_dtypes.int4)))
    assert codes.coded and not numbers.coded
    np.testing.assert_array_equal(dense(codes), dense(numbers))
    sizes = jnp.asarray([2, 4], jnp.int32)
    ours, theirs = (grouped_linear(x, kernels, sizes, "tpu-interpreted") for kernels in (codes, numbers))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("form", [KernelFormat("int4", 128, symmetric=False), EXPERTS[3], MXFP4], ids=name)
def test_experts_are_not_written_out_dequantized_on_a_tpu(form: KernelFormat) -> None:
    topology = tpu_topology("v5e:1x1")
    whole = NamedSharding(make_mesh(topology, {"data": 1}), PartitionSpec())

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    table = Parameter((16, 2, 128, 1024), (axes.EXPERT, None, axes.MLP, None), format=form)
    parts = held_parts(table, Placement(whole.mesh))
    kernels = kernel_from_parts(form, {key: abstract(part.shape, part.dtype) for key, part in parts.items()})
    rows, sizes = abstract((32, 1024), jnp.bfloat16), abstract((16,), jnp.int32)
    program = compile_for(topology, partial(grouped_linear, platform="tpu"), rows, kernels, sizes)
    assert program.temp_bytes < 16 * 2 * 128 * 1024 // 4
    assert not [one for one in program.estimate.top if "bitcast_convert" in one.name], "a pass over the kernels"


def test_the_gradient_of_experts_is_that_of_their_dequantized_kernels() -> None:
    kernels, x = kernel_of(random(3, 8, 32), KernelFormat("int4", 16, symmetric=False)), jnp.asarray(random(9, 32))
    sizes = jnp.asarray([4, 2, 3], jnp.int32)
    ours, theirs = (
        jax.grad(lambda x, kernels=kernels: jnp.sin(grouped_linear(x, kernels, sizes, "cpu")).sum())(x)
        for kernels in (kernels, dense(kernels))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_static_scale_rounds_the_inner_features_before_the_router_weighs_them() -> None:
    step = np.asarray([0.03, 0.05], np.float32)
    form = KernelFormat("int8", activation=ActivationFormat("int8", static=True))
    up, down = random(2, 24, 16), kernel_of(random(2, 16, 24, seed=1), form)
    down = replace(down, input_scale=jnp.asarray(step))
    bias, x = random(2, 16, seed=2), random(6, 16, seed=3)
    spec = MoESpec(2, 1, 24, ActivationSpec("relu2"), gated=False, expert_bias=True)
    chosen, weights = np.asarray([[0], [1], [1], [0], [1], [0]]), np.full((6, 1), 0.3, np.float32)
    kernels = ExpertKernels(jnp.asarray(up), down, down_bias=jnp.asarray(bias))
    out = run_experts(jnp.asarray(x), jnp.asarray(chosen), jnp.asarray(weights), kernels, spec, "cpu")
    of_down = np.asarray(dense(down))
    for row, (expert,) in enumerate(chosen):
        inner = np.maximum(up[expert] @ x[row], 0) ** 2
        rounded = np.clip(np.round(inner / step[expert]), -127, 127) * step[expert]
        np.testing.assert_allclose(out[row], 0.3 * (of_down[expert] @ rounded + bias[expert]), rtol=1e-4, atol=1e-3)
