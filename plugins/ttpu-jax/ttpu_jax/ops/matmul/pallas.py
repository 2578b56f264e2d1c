"""Chooses between the Pallas products with quantized kernels and those of XLA, and runs the former on every device of a
mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.ops.matmul.activations import quantize_activations
from ttpu_jax.ops.matmul.devices import Devices, UsePallas
from ttpu_jax.ops.matmul.pallas_blocks import LANES, block_table, blocks_for
from ttpu_jax.ops.matmul.shards import product_of_shards


def why_not_pallas(form: KernelFormat, shape: tuple[int, ...], rows: int, devices: Devices) -> str | None:
    """Why XLA computes a product instead of a Pallas kernel; None if the kernel does.

    Args:
        form: of the kernel.
        shape: [*out, in] of the kernel, of all devices together.
        rows: of the activations, of all devices together.
        devices: where it runs.
    """
    if devices.use_pallas is False:
        return "use_pallas=False"
    if not devices.platform.startswith("tpu"):
        return "the kernels are for TPUs"
    *out, inputs = shape
    ways = [devices.shards(axes) for axes in devices.kernel_axes] or [1] * len(shape)
    if form.group_size is not None and inputs // ways[-1] % form.group_size:
        return f"groups of {form.group_size} inputs lie on two devices"
    rows = -(-rows // prod(devices.shards(axes) for axes in devices.row_axes))
    channels = prod(size // count for size, count in zip(out, ways[:-1], strict=True))
    return why_not_on_device(form, channels, inputs // ways[-1], rows, devices.kind, devices.use_pallas)


def why_not_on_device(
    form: KernelFormat, channels: int, inputs: int, rows: int, kind: str, use_pallas: UsePallas = "auto"
) -> str | None:
    """`why_not_pallas` of one TPU's share of a product.

    Args:
        form: of the kernel.
        channels: outputs of the device's share of the kernel.
        inputs: of the device's share.
        rows: of the activations there.
        kind: `jax.Device.device_kind`.
        use_pallas: True or "auto".
    """
    try:
        blocks_for(kind, rows, channels, inputs, form.group_size, jnp.dtype(form.dtype))
    except NotImplementedError as error:
        return str(error)
    if use_pallas is True:
        return None
    if form.group_size is None:
        return "XLA multiplies by scales per channel after its own product, without writing weights out"
    limits = block_table(kind)["rows"]
    if form.activation is not None:
        most, what = limits["activations"], "integers"
    else:
        masks = max(1, LANES // form.group_size)
        most, what = limits["groups"] // masks**2, f"groups of {form.group_size}"
    return None if rows <= most else f"with more than {most} rows XLA is faster for {what}"


def product(
    x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None, out_dtype: Any, devices: Devices
) -> jax.Array:
    """x [..., in] times a kernel [*out, in], plus bias [*out]: [..., *out] in `out_dtype`. On a mesh each device
    multiplies by its own shard of the kernel, and devices that share the inputs add up their sums.

    Args:
        x: [..., in].
        kernel: [*out, in], which `why_not_pallas` lets pass.
        bias: [*out].
        out_dtype: of the result.
        devices: where it runs.
    """
    from ttpu_jax.ops.matmul.pallas_weight_only import weight_only_product  # Pallas takes 0.4 s to import

    if kernel.input_order is not None:
        x, kernel = jnp.take(x, kernel.input_order, axis=-1), replace(kernel, input_order=None)
    step: jax.Array | None = None
    if kernel.format.activation is not None:
        values, step = quantize_activations(x, kernel.format.activation, kernel.input_scale)
        x, kernel = values.astype(x.dtype), replace(kernel, input_scale=None)  # exact in bfloat16
    multiply = partial(weight_only_product, kind=devices.kind, interpret=devices.platform != "tpu")
    # A sum of several devices, and a bias after it, are rounded once.
    sums_dtype = out_dtype if bias is None and step is None else jnp.float32
    if devices.mesh is None:
        sums = multiply(x, kernel, sums_dtype)
    else:

        def on_one_device(x: jax.Array, step: jax.Array | None, kernel: QuantizedKernel, dtype: Any) -> jax.Array:
            return multiply(x, kernel, dtype)

        sums = product_of_shards(on_one_device, x, None, kernel, devices, dtype=sums_dtype, exchanged=jnp.float32)
    if step is not None:
        sums = sums * step.reshape(*step.shape, *(1,) * (sums.ndim - step.ndim))
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    return sums.astype(out_dtype)
