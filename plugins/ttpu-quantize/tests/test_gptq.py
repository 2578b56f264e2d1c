"""GPTQ: errors of products are smaller than those of rounding to nearest, in every format and order."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.spec.kernel_format import LARGEST, PartName
from ttpu_quantize.clipping import round_clipped
from ttpu_quantize.gptq import GPTQ, Order
from ttpu_quantize.scaling import squared_error

INPUTS = 64


def correlated(random: np.random.Generator) -> np.ndarray:
    """The sum of x xᵀ over inputs with outliers that depend on each other."""
    mix = random.standard_normal((INPUTS, INPUTS)) * random.lognormal(0, 1, INPUTS)
    inputs = random.standard_normal((400, INPUTS)) @ mix
    products: np.ndarray = (inputs.T @ inputs).astype(np.float32)
    return products


@pytest.mark.parametrize("order", ["none", "static", "group"])
@pytest.mark.parametrize("scheme", ["w4a16-g16", "w4a16-g16-asym", "w4a16", "w8a16", "fp8"])
def test_errors_are_below_those_of_rounding_to_nearest(scheme: str, order: Order) -> None:
    random = np.random.default_rng(0)
    form = QuantizationConfig.parse(scheme).kernel_format
    weights, products = random.standard_normal((32, INPUTS)).astype(np.float32), correlated(random)
    ordered = replace(form, input_order=order == "group" and form.group_size is not None)
    found = dequantize(GPTQ(order=order).round(weights, products, ordered), ordered)
    nearest = dequantize(round_kernel(weights, form), form)
    assert squared_error(found - weights, products) < 0.9 * squared_error(nearest - weights, products)


@pytest.mark.parametrize("order", ["static", "group"])
@pytest.mark.parametrize("scheme", ["w4a16-g16", "w4a16-g16-asym", "w4a16", "w8a16", "fp8", "mxfp4"])
def test_every_pass_of_corrections_lowers_the_error(scheme: str, order: Order) -> None:
    random = np.random.default_rng(4)
    form = QuantizationConfig.parse(scheme).kernel_format
    weights, products = random.standard_normal((24, INPUTS)).astype(np.float32), correlated(random)
    ordered = replace(form, input_order=order == "group" and form.group_size is not None)
    found = [GPTQ(order=order, passes=passes).round(weights, products, ordered) for passes in range(3)]
    damped = products + GPTQ().damping * np.eye(INPUTS, dtype=np.float32) * products.diagonal().mean()
    errors = [squared_error(dequantize(parts, ordered) - weights, damped) for parts in found]
    assert errors[2] <= errors[1] < errors[0]
    for parts in found:
        held = np.dtype(getattr(ml_dtypes, form.scale_dtype, form.scale_dtype))
        np.testing.assert_array_equal(parts["scale"], parts["scale"].astype(held).astype(np.float32))
        assert np.abs(parts["values"].astype(np.float32)).max() <= LARGEST[form.dtype] + form.dtype.startswith("int")


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    random = np.random.default_rng(1)
    form = QuantizationConfig.parse("w4a16-g16").kernel_format
    weights = random.standard_normal((8, INPUTS)).astype(np.float32)
    for products in (np.diag(random.uniform(1, 2, INPUTS)).astype(np.float32), np.zeros((INPUTS, INPUTS), np.float32)):
        found, nearest = GPTQ(clip=False, passes=0).round(weights, products, form), round_kernel(weights, form)
        np.testing.assert_array_equal(found["values"], nearest["values"])
        np.testing.assert_array_equal(found["scale"], nearest["scale"])


@pytest.mark.parametrize("scheme", ["w4a16-g16", "w4a16-asym"])
def test_scales_that_may_clip_have_less_error(scheme: str) -> None:
    random = np.random.default_rng(3)
    form = QuantizationConfig.parse(scheme).kernel_format
    weights = random.standard_normal((16, INPUTS)).astype(np.float32)
    importance = random.lognormal(0, 2, INPUTS).astype(np.float32)

    def error(parts: dict[PartName, np.ndarray]) -> float:
        return float((importance * (dequantize(parts, form) - weights) ** 2).sum())

    assert error(round_clipped(weights, importance, form)) < 0.95 * error(round_kernel(weights, form))


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    random = np.random.default_rng(2)
    form = QuantizationConfig.parse("w4a16-g16").kernel_format
    weights, products = random.standard_normal((8, INPUTS)).astype(np.float32), correlated(random)
    products[3], products[:, 3] = 0, 0
    assert np.isfinite(dequantize(GPTQ().round(weights, products, form), form)).all()
