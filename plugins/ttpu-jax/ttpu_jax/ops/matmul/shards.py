"""Products that each device of a mesh computes with its own shard of a quantized kernel."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from ttpu_jax.ops.kernels import QuantizedKernel, map_arrays
from ttpu_jax.ops.matmul.devices import Devices


class Multiply(Protocol):
    """Multiplies on one device."""

    def __call__(self, x: jax.Array, step: jax.Array | None, kernel: QuantizedKernel, dtype: Any, /) -> jax.Array:
        """x [..., in] times `step` [..., 1] times the kernel [*out, in]: [..., *out] in `dtype`."""
        ...


def product_of_shards(
    multiply: Multiply,
    x: jax.Array,
    step: jax.Array | None,
    kernel: QuantizedKernel,
    devices: Devices,
    *,
    dtype: Any,
    exchanged: Any,
) -> jax.Array:
    """x times `step` times a kernel. Devices that share the inputs add up their scaled sums.

    Args:
        multiply: the product on one device.
        x: [..., in].
        step: [..., 1], the scale of each row of x; None if x has no scale.
        kernel: [*out, in], in the order of x's inputs.
        devices: where it runs; `mesh` is not None.
        dtype: of the result.
        exchanged: the dtype of the sums that devices exchange.

    Returns:
        [..., *out].
    """
    *out_axes, in_axes = (axes or None for axes in devices.kernel_axes)
    row_axes = tuple(axes or None for axes in devices.row_axes)

    def on_one_device(x: jax.Array, step: jax.Array | None, kernel: QuantizedKernel) -> jax.Array:
        if in_axes is None:
            return multiply(x, step, kernel, dtype)
        return jax.lax.psum(multiply(x, step, kernel, exchanged), in_axes).astype(dtype)

    of_kernel = map_arrays(kernel, (*out_axes, in_axes), lambda _, axes: PartitionSpec(*axes))
    of_step = None if step is None else PartitionSpec(*row_axes, None)
    run = jax.shard_map(
        on_one_device,
        mesh=devices.mesh,
        in_specs=(PartitionSpec(*row_axes, in_axes), of_step, of_kernel),
        out_specs=PartitionSpec(*row_axes, *out_axes),
        check_vma=False,  # a Pallas kernel does not say over which axes its result varies
    )
    product: jax.Array = run(x, step, kernel)
    return product
