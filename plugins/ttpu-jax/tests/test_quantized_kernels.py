"""Every format of a quantized kernel: what it stands for, its parts, and its products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.kernel_format import KernelFormat, parts_of
from ttpu_jax.ops.kernels import QuantizedKernel, dense, kernel_from_parts, map_arrays, quantize
from ttpu_jax.params.quantized import held_parts, parts_as_read, placed_as_held, round_dense

SHAPE = (3, 8, 64)  # [*out, in]
MXFP4 = KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu")
FORMATS = [
    KernelFormat("int8"),
    KernelFormat("int8", symmetric=False),
    KernelFormat("int8", 16, scale_dtype="bfloat16"),
    KernelFormat("int4", 16),
    KernelFormat("int4", 16, symmetric=False),
    KernelFormat("int4", symmetric=False),
    KernelFormat("float8_e4m3fn"),
    KernelFormat("float8_e4m3fn", 32),
    MXFP4,
]
HALF_STEP = {"int8": 0.5, "int4": 0.5, "float8_e4m3fn": 16.0, "float4_e2m1fn": 1.0}
"""Of the dtype's largest number, in units of the scale."""


def name(form: KernelFormat) -> str:
    group = "channel" if form.group_size is None else f"group {form.group_size}"
    return f"{form.dtype} {group}{'' if form.symmetric else ' asymmetric'} {form.scale_dtype}"


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def dequantized(kernel: QuantizedKernel) -> np.ndarray:
    """The weights that the parts stand for, by the definition, in float64."""
    values, scale = np.asarray(kernel.values).astype(np.float64), np.asarray(kernel.scale).astype(np.float64)
    zero = np.zeros_like(scale) if kernel.zero_point is None else np.asarray(kernel.zero_point).astype(np.float64)
    if kernel.format.group_size is None:
        scale, zero = scale[..., None], zero[..., None]
    repeats = values.shape[-1] // scale.shape[-1]
    return np.repeat(scale, repeats, -1) * (values - np.repeat(zero, repeats, -1))


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_rounding_moves_a_weight_by_at_most_half_a_step(form: KernelFormat) -> None:
    kernel = random(*SHAPE)
    kernel[1, 2] = 0.0
    kernel[2, 3, 5] = 40.0  # an outlier
    held = jax.jit(quantize, static_argnums=1)(kernel, form)
    exact = dequantized(held)
    scale = np.asarray(held.scale).astype(np.float64)
    steps = np.repeat(scale if form.group_size else scale[..., None], 64 // form.groups(64), -1)
    # Where zero lies on a step, the range is up to half a step out of place; a rounded scale misses its end.
    slack = (1.0 if form.symmetric else 2.0) + (127 * 2.0**-8 if form.scale_dtype == "bfloat16" else 0)
    assert (np.abs(exact - kernel) <= steps * HALF_STEP[form.dtype] * slack * (1 + 1e-5)).all()
    assert (exact[1, 2] == 0).all() and (scale[1, 2] == 1).all()
    np.testing.assert_allclose(dense(held), exact, rtol=1e-6)


def stacked(form: KernelFormat) -> QuantizedKernel:
    """Kernels of two experts with all parts that the format has."""
    held = quantize(jnp.asarray(random(2, 8, 64)), KernelFormat(form.dtype, form.group_size, form.symmetric))
    parts: dict[Any, Any] = dict(held.parts)
    if form.input_order:
        parts["input_order"] = jnp.stack([jnp.arange(64)[::-1], jnp.roll(jnp.arange(64), 5)])
    if form.activation is not None and form.activation.static:
        parts["input_scale"] = jnp.asarray([0.5, 0.25])
    return kernel_from_parts(form, parts)


def test_a_kernel_is_made_of_the_parts_in_the_parameter_table() -> None:
    form = KernelFormat("int4", 16, symmetric=False, input_order=True)
    kernel = stacked(form)
    table = Parameter((2, 8, 64), (axes.EXPERT, axes.MLP, None), format=form)
    expected = {name: part.shape for name, part in parts_of(table)}
    assert {name: part.shape for name, part in kernel.parts.items()} == expected
    assert jax.tree.structure(kernel_from_parts(form, kernel.parts)) == jax.tree.structure(kernel)
    logical = map_arrays(kernel, table.axes, lambda _, by: by)
    assert logical.parts == {name: part.axes for name, part in parts_of(table)}


def test_a_kernel_with_an_input_order_is_dense_in_the_order_of_the_features() -> None:
    kernel = stacked(KernelFormat("int4", 16, symmetric=False, input_order=True))
    columns, found = dequantized(kernel), np.asarray(dense(kernel))
    for expert, order in enumerate(np.asarray(kernel.input_order)):
        np.testing.assert_allclose(found[expert][:, order], columns[expert], rtol=1e-6)


def test_a_tpu_holds_the_4_bit_floats_of_experts_by_their_codes() -> None:
    tpu: Any = SimpleNamespace(platform="tpu")
    of_expert = Parameter((2, 8, 64), (axes.EXPERT, axes.MLP, None), format=MXFP4)
    assert held_parts(of_expert, tpu)["values"].dtype == "int4"
    assert parts_as_read(of_expert, tpu)["values"].dtype == "float4_e2m1fn"
    of_layer = replace(of_expert, shape=(8, 64), axes=(axes.MLP, None))
    assert held_parts(of_layer, tpu)["values"].dtype == "float4_e2m1fn"

    read = quantize(jnp.asarray(random(2, 8, 64)), MXFP4)
    codes = np.asarray(read.values).view(ml_dtypes.int4)
    placed = placed_as_held(replace(read, values=read.values.copy()), of_expert, tpu)
    rounded = round_dense(jnp.asarray(random(2, 8, 64)), of_expert, tpu)
    for each in (placed, rounded):
        assert each.coded
        np.testing.assert_array_equal(np.asarray(each.values), codes)
        np.testing.assert_array_equal(np.asarray(each.numbers), np.asarray(read.values))
    assert placed_as_held(read, of_layer, tpu) is read
