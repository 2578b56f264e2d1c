"""The product of activations with a dense kernel in training. It is rounded to the activations' dtype where it is made,
as are its gradients. Devices that share the kernel sum its gradient in a ring, block by block: while a device multiplies
for one block, the sum of the one before is on its way to the next device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Ring:
    """The devices that sum the gradient of a kernel [*out, in], each for its own part of one dimension. Static.

    Attributes:
        mesh: the devices.
        axis: the mesh axis that shards both the rows and one dimension of the kernel.
        dimension: of the kernel: 0 or the last.
        kernel: for each dimension of the kernel, the mesh axes that shard it.
        rows: for each dimension of the activations but the last, the mesh axes that shard it.
    """

    mesh: Mesh
    axis: str
    dimension: int
    kernel: tuple[Axes, ...]
    rows: tuple[Axes, ...]


def ring_of(mesh: Mesh | None, kernel: tuple[Axes, ...], rows: tuple[Axes, ...]) -> Ring | None:
    """The ring of a kernel, or None where the compiler is to sum its gradient.

    Args:
        mesh: the devices.
        kernel: for each dimension of the kernel, the mesh axes that shard it.
        rows: for each dimension of the activations but the last, the mesh axes that shard it.
    """
    of_rows = {axis for each in rows for axis in each}
    shared = [(place, axis) for place, each in enumerate(kernel) for axis in each if axis in of_rows]
    if mesh is None or len(shared) != 1:
        return None
    ((place, axis),) = shared
    if place not in (0, len(kernel) - 1) or kernel[place] != (axis,):
        return None
    return Ring(mesh, axis, place, kernel, rows)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def trained_product(x: jax.Array, kernel: jax.Array, dtype: Any, ring: Ring | None) -> jax.Array:
    """x [..., in] times kernel [*out, in]: [..., *out] in `dtype`.

    Args:
        x: [..., in].
        kernel: [*out, in] in x's dtype.
        dtype: of the product.
        ring: that sums the kernel's gradient; None leaves that to the compiler.
    """
    dimensions = (((x.ndim - 1,), (kernel.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=dtype)


def _forward(x: jax.Array, kernel: jax.Array, dtype: Any, ring: Ring | None) -> tuple[jax.Array, Any]:
    return trained_product(x, kernel, dtype, ring), (x, kernel)


def _backward(dtype: Any, ring: Ring | None, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    gradient = gradient.astype(x.dtype)
    leading = x.ndim - 1
    outputs = tuple(range(leading, gradient.ndim)), tuple(range(kernel.ndim - 1))
    of_x = jax.lax.dot_general(gradient, kernel, (outputs, ((), ())), preferred_element_type=x.dtype)
    if ring is not None:
        return of_x, _summed_in_ring(gradient, x, ring)
    rows = tuple(range(leading)), tuple(range(leading))
    return of_x, jax.lax.dot_general(gradient, x, (rows, ((), ())), preferred_element_type=kernel.dtype)


trained_product.defvjp(_forward, _backward)


def _summed_in_ring(gradient: jax.Array, x: jax.Array, ring: Ring) -> jax.Array:
    """The kernel's gradient [*out, in], each device its own part.

    Args:
        gradient: of the product, [..., *out].
        x: [..., in].
        ring: the devices.
    """
    taken = {axis for each in ring.rows for axis in each}
    whole = tuple(tuple(axis for axis in each if axis not in taken) for each in ring.kernel)
    rows = tuple(each or None for each in ring.rows)
    arguments = PartitionSpec(*rows, *(each or None for each in whole[:-1])), PartitionSpec(*rows, whole[-1] or None)
    others = tuple(sorted(taken - {ring.axis}))

    def local(gradient: jax.Array, x: jax.Array) -> jax.Array:
        shape = (*gradient.shape[len(rows) :], x.shape[-1])
        outputs = gradient.reshape(-1, prod(shape[:-1]))
        inputs = x.reshape(-1, shape[-1])
        if ring.dimension:
            summed = _both_ways(inputs, outputs, ring, lambda block, other: _product(other, block))
        else:
            # The first dimension of the outputs is divided, so that a block is whole rows of the kernel.
            summed = _both_ways(outputs, inputs, ring, _product)
        count = ring.mesh.shape[ring.axis]
        own = tuple(size // count if place == ring.dimension else size for place, size in enumerate(shape))
        return jax.lax.psum(summed, others).reshape(own) if others else summed.reshape(own)

    results = PartitionSpec(*(each or None for each in ring.kernel))
    on_devices = jax.shard_map(local, mesh=ring.mesh, in_specs=arguments, out_specs=results, check_vma=False)
    return on_devices(gradient, x)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 [features of a, features of b], the sum over rows of a [rows, ...] and b [rows, ...]."""
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _both_ways(divided: jax.Array, other: jax.Array, ring: Ring, product: Any) -> jax.Array:
    """The products of this device's block of `divided` [rows, blocks * width] with `other` [rows, features], summed
    over the ring: half of the features go around each way."""
    count, here = ring.mesh.shape[ring.axis], jax.lax.axis_index(ring.axis)
    width, features = divided.shape[1] // count, other.shape[1]
    halves = [other] if features % 256 else jnp.split(other, 2, axis=1)
    sums: list[Any] = [None] * len(halves)
    last: Any = None
    for turn in range(count):
        for way, half in enumerate(halves):
            step = -1 if way else 1
            left = step * (count - 1 - turn)  # devices that the sum has yet to come to
            place = jax.lax.rem(here + (left + count), count) * width
            if last is not None:
                # One product after the other: the sum that goes the other way arrives meanwhile.
                half, _ = jax.lax.optimization_barrier((half, last))
            found = product(jax.lax.dynamic_slice_in_dim(divided, place, width, 1), half)
            if turn:
                to = [(device, (device + step) % count) for device in range(count)]
                found = found + jax.lax.ppermute(sums[way], ring.axis, to).astype(jnp.float32)
            sums[way] = last = found.astype(divided.dtype)
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=0 if ring.dimension else 1)
