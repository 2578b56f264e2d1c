"""Products that each device of a mesh computes with its own shard of a quantized kernel."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
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
    """x times `step` times a kernel. Devices that share the inputs add up their scaled sums. Where mesh axes cut the
    residual stream, x is gathered before a product with whole inputs, in its own dtype, and the sums of shared inputs
    are left cut.

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
    stream = devices.stream_axes
    cut_rows = (*row_axes[:-1], (*devices.row_axes[-1], *stream)) if stream else row_axes
    scatters = bool(stream) and in_axes == stream

    def on_one_device(x: jax.Array, step: jax.Array | None, kernel: QuantizedKernel) -> jax.Array:
        if in_axes is None:
            if stream:
                x = jax.lax.all_gather(x, stream, axis=x.ndim - 2, tiled=True)
                step = None if step is None else jax.lax.all_gather(step, stream, axis=x.ndim - 2, tiled=True)
            return multiply(x, step, kernel, dtype)
        sums = multiply(x, step, kernel, exchanged)
        return (_scattered(sums, len(row_axes) - 1, in_axes) if scatters else jax.lax.psum(sums, in_axes)).astype(dtype)

    of_kernel = map_arrays(kernel, (*out_axes, in_axes), lambda _, axes: PartitionSpec(*axes))
    in_rows, out_rows = cut_rows if in_axes is None else row_axes, cut_rows if scatters else row_axes
    of_step = None if step is None else PartitionSpec(*in_rows, None)
    run = jax.shard_map(
        on_one_device,
        mesh=devices.mesh,
        in_specs=(PartitionSpec(*in_rows, in_axes), of_step, of_kernel),
        out_specs=PartitionSpec(*out_rows, *out_axes),
        check_vma=False,  # a Pallas kernel does not say over which axes its result varies
    )
    product: jax.Array = run(x, step, kernel)
    return product


def _scattered(sums: jax.Array, axis: int, devices: tuple[str, ...]) -> jax.Array:
    """The sum over devices of `sums` [..., rows, *out], of whose rows (dimension `axis`) each keeps its share."""
    ways = jax.lax.axis_size(devices)
    parts = sums.reshape(*sums.shape[:axis], ways, -1, *sums.shape[axis + 1 :])
    # XLA:TPU adds up everything everywhere and cuts that, unless the parts are the outermost dimension.
    return jax.lax.psum_scatter(jnp.moveaxis(parts, axis, 0), devices, scatter_dimension=0)
