"""The product of activations with a dense kernel in training. It is rounded to the activations' dtype where it is
made, as are its gradients. Devices that share the kernel sum its gradient in a ring, block by block: while a device
multiplies for one block, the sum of the one before is on its way to the next device. On chips with SparseCores the
compiler has these sum it in the background."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from ttpu_core.sharding.hardware import chip_of_device_kind
from ttpu_core.sharding.strategy import STAGE
from ttpu_jax.ops.memories import in_hbm

Axes = tuple[str, ...]
LANES = 128

# Sums of up to so many bytes stay in HBM on their way around a ring, and of larger ones what has arrived. (Those of
# 14 MiB of two kernels at once keep HBM busy: a step of Llama-3.1-8B on v5e:2x4 takes 928 ms with them, else 916.)
_IN_HBM_BYTES = 8 << 20


@dataclass(frozen=True)
class GradientRing:
    """The devices that sum the gradient of a kernel [*out, in], each for its own part of one dimension. Static.

    Attributes:
        mesh: the devices.
        axis: the mesh axis that shards both the rows and one dimension of the kernel.
        dimension: of the kernel: 0 or the last.
        kernel: for each dimension of the kernel, the mesh axes that shard it.
        rows: for each dimension of the activations but the last, the mesh axes that shard it.
        by_compiler: whether the compiler sums the gradient, which it leaves to SparseCores.
        sums_in_hbm: whether sums stay in HBM on their way. XLA:TPU compiles a product anew for each combination of
            HBM and VMEM that it reads from and writes to.
        across_slices: whether devices of several slices have rows.
    """

    mesh: Mesh
    axis: str
    dimension: int
    kernel: tuple[Axes, ...]
    rows: tuple[Axes, ...]
    by_compiler: bool = False
    sums_in_hbm: bool = False
    across_slices: bool = False


def gradient_ring(
    mesh: Mesh | None,
    kernel: tuple[Axes, ...],
    rows: tuple[Axes, ...],
    *,
    sums_in_hbm: bool = False,
    across: Collection[str] = (),
) -> GradientRing | None:
    """The devices that sum the gradient of a kernel, or None where they form no ring.

    Args:
        mesh: the devices.
        kernel: for each dimension of the kernel, the mesh axes that shard it.
        rows: for each dimension of the activations but the last, the mesh axes that shard it.
        sums_in_hbm: whether sums stay in HBM on their way; on TPUs only.
        across: mesh axes along which devices belong to several slices.
    """
    of_rows = {axis for each in rows for axis in each}
    shared = [(place, axis) for place, each in enumerate(kernel) for axis in each if axis in of_rows]
    if mesh is None or len(shared) != 1:
        return None
    ((place, axis),) = shared
    if place not in (0, len(kernel) - 1) or kernel[place] != (axis,):
        return None
    chip = chip_of_device_kind(mesh.devices.flat[0].device_kind)
    by_compiler = chip is not None and chip.sums_on_sparse_cores
    # Over stages products are mapped (vmap), which a call of the compiler's own cannot be; and on several slices libtpu
    # 0.0.42 fails to remove such a call: "cannot remove instruction", as others were told to follow it.
    sums_in_hbm &= not by_compiler and not across and mesh.shape.get(STAGE, 1) == 1
    across_slices = not of_rows.isdisjoint(across)
    return GradientRing(mesh, axis, place, kernel, rows, by_compiler, sums_in_hbm, across_slices)


def trained_product(x: jax.Array, kernel: jax.Array, dtype: Any, ring: GradientRing | None) -> jax.Array:
    """x [..., in] times kernel [*out, in]: [..., *out] in `dtype`.

    Args:
        x: [..., in].
        kernel: [*out, in] in x's dtype.
        dtype: of the product.
        ring: that sums the kernel's gradient; None leaves that to the compiler.
    """
    (product,) = trained_products(x, (kernel,), dtype, ring)
    return product


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def trained_products(
    x: jax.Array, kernels: tuple[jax.Array, ...], dtype: Any, ring: GradientRing | None
) -> tuple[jax.Array, ...]:
    """x [..., in] times each of some kernels of one shape [*out, in]: [..., *out] each, in `dtype`.

    Args:
        x: [..., in].
        kernels: [*out, in] each, in x's dtype.
        dtype: of the products.
        ring: that sums the gradient of a kernel; None leaves that to the compiler.
    """
    return _of_each(x, kernels, dtype)


def _of_each(x: jax.Array, kernels: tuple[jax.Array, ...], dtype: Any) -> tuple[jax.Array, ...]:
    dimensions = (((x.ndim - 1,), (kernels[0].ndim - 1,)), ((), ()))
    return tuple(jax.lax.dot_general(x, each, dimensions, preferred_element_type=dtype) for each in kernels)


def _forward(x: jax.Array, kernels: tuple[jax.Array, ...], dtype: Any, ring: GradientRing | None) -> tuple[Any, Any]:
    # Not by `trained_products` itself, within which `jax.checkpoint` would see no products to keep.
    return _of_each(x, kernels, dtype), (x, kernels)


def _backward(
    dtype: Any, ring: GradientRing | None, kept: Any, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, kernels = kept
    gradients = tuple(gradient.astype(x.dtype) for gradient in gradients)
    if ring is not None and ring.by_compiler:
        # Else XLA:TPU transposes gradients for the product with x, and with them all that is kept to compute them.
        gradients = tuple(_laid_out(one, ring) for one in gradients)
    leading = x.ndim - 1
    outputs = tuple(range(leading, gradients[0].ndim)), tuple(range(kernels[0].ndim - 1))
    wide = x.dtype if len(gradients) == 1 else jnp.float32
    each = [
        jax.lax.dot_general(gradient, one, (outputs, ((), ())), preferred_element_type=wide)
        for gradient, one in zip(gradients, kernels, strict=True)
    ]
    of_x = sum(each[1:], each[0]).astype(x.dtype)
    if ring is not None and not ring.by_compiler:
        return of_x, tuple(one.astype(kernels[0].dtype) for one in _summed_in_ring(gradients, x, ring))
    rows = tuple(range(leading)), tuple(range(leading))
    return of_x, tuple(
        jax.lax.dot_general(gradient, x, (rows, ((), ())), preferred_element_type=kernels[0].dtype)
        for gradient in gradients
    )


trained_products.defvjp(_forward, _backward)


def _laid_out(x: jax.Array, ring: GradientRing) -> jax.Array:
    """x, the gradient of a product, [..., *out] in the order of its dimensions on each device."""

    def local(own: jax.Array) -> jax.Array:
        return with_layout_constraint(own, Layout(tuple(range(own.ndim))))

    of_outputs, _ = _specs(ring)
    if sum(each is not None for each in of_outputs) < 2 and not ring.across_slices:
        return local(x)  # `shard_map` would make a step of v6e:4x4 a fifth longer
    # Where two dimensions are sharded, or slices share the rows, the compiler would gather x for the constraint.
    on_devices = jax.shard_map(local, mesh=ring.mesh, in_specs=of_outputs, out_specs=of_outputs, check_vma=False)
    found: jax.Array = on_devices(x)
    return found


def _specs(ring: GradientRing) -> tuple[PartitionSpec, PartitionSpec]:
    """How the gradients of a product [..., *out] and its inputs [..., in] are sharded."""
    taken = {axis for each in ring.rows for axis in each}
    whole = [tuple(axis for axis in each if axis not in taken) or None for each in ring.kernel]
    rows = [each or None for each in ring.rows]
    return PartitionSpec(*rows, *whole[:-1]), PartitionSpec(*rows, whole[-1])


def _summed_in_ring(gradients: tuple[jax.Array, ...], x: jax.Array, ring: GradientRing) -> tuple[jax.Array, ...]:
    """The gradient of each kernel [*out, in], each device its own part.

    Args:
        gradients: of the products, [..., *out] each.
        x: [..., in].
        ring: the devices.
    """
    of_outputs, of_inputs = _specs(ring)
    taken = {axis for each in ring.rows for axis in each}
    others, count = tuple(sorted(taken - {ring.axis})), ring.mesh.shape[ring.axis]

    def local(gradients: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        shape = (*gradients[0].shape[len(ring.rows) :], x.shape[-1])
        outputs = [gradient.reshape(-1, prod(shape[:-1])) for gradient in gradients]
        if len(outputs) > 1:  # in one shape also where the compiler made them, so that their products share their code
            outputs = list(jax.lax.optimization_barrier(tuple(outputs)))
        inputs = x.reshape(-1, shape[-1])
        if ring.dimension:
            summed = _both_ways([(inputs, each) for each in outputs], ring, lambda block, other: _product(other, block))
        else:
            # The first dimension of the outputs is divided, so that a block is whole rows of the kernel.
            summed = _both_ways([(each, inputs) for each in outputs], ring, _product)
        own = tuple(size // count if place == ring.dimension else size for place, size in enumerate(shape))
        found = tuple(each.reshape(own) for each in summed)
        return jax.lax.psum(found, others) if others else found

    arguments = (of_outputs,) * len(gradients), of_inputs
    results = (PartitionSpec(*(each or None for each in ring.kernel)),) * len(gradients)
    on_devices = jax.shard_map(local, mesh=ring.mesh, in_specs=arguments, out_specs=results, check_vma=False)
    return on_devices(gradients, x)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 [features of a, features of b], the sum over rows of a [rows, ...] and b [rows, ...]."""
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _both_ways(pairs: list[tuple[jax.Array, jax.Array]], ring: GradientRing, product: Any) -> list[jax.Array]:
    """For each pair, the products of this device's block of the first [rows, blocks * width] with the second [rows,
    features], summed over the ring. One pair goes one way around and the next the other; of a single pair, half of the
    features each."""
    count, here = ring.mesh.shape[ring.axis], jax.lax.axis_index(ring.axis)
    halved = len(pairs) == 1 and pairs[0][1].shape[1] % (2 * LANES) == 0
    if halved:
        divided, other = pairs[0]
        pairs = [(divided, half) for half in jnp.split(other, 2, axis=1)]
    rows, blocks = pairs[0][0].shape
    if len(pairs) == 2 and count % 2 == 0 and rows > 4 * (blocks // count):
        # Of each row half as much is read for a block, and the block is written and read once more.
        summed = _two_blocks_at_once(pairs, ring, product)
        return [jnp.concatenate(summed, axis=0 if ring.dimension else 1)] if halved else summed

    def stored(one: jax.Array) -> jax.Array:
        return in_hbm(one) if ring.sums_in_hbm and one.nbytes <= _IN_HBM_BYTES else one

    sums: list[Any] = [None] * len(pairs)
    last: Any = None
    for turn in range(count):
        for number, (divided, other) in enumerate(pairs):
            width, step = divided.shape[1] // count, -1 if number % 2 else 1
            left = step * (count - 1 - turn)  # devices that the sum has yet to come to
            place = jax.lax.rem(here + (left + count), count) * width
            arrived = None
            if turn:
                to = [(device, (device + step) % count) for device in range(count)]
                arrived = jax.lax.ppermute(stored(sums[number]), ring.axis, to)
            if last is not None:
                # One product after the other: what goes the other way arrives meanwhile, and is added within the next.
                place, arrived, _ = jax.lax.optimization_barrier((place, arrived, last))
            found = product(jax.lax.dynamic_slice_in_dim(divided, place, width, 1), other)
            if arrived is not None:
                found = found + (in_hbm(arrived) if ring.sums_in_hbm else arrived).astype(jnp.float32)
            sums[number] = last = found.astype(divided.dtype)
    sums = [stored(each) for each in sums]
    return [jnp.concatenate(sums, axis=0 if ring.dimension else 1)] if halved else sums


def _two_blocks_at_once(pairs: list[tuple[jax.Array, jax.Array]], ring: GradientRing, product: Any) -> list[jax.Array]:
    """`_both_ways` of two pairs, each of whose products is that of two blocks, which reads the second of the pair half
    as often. While one product is computed, one sum of each pair is on its way, and arrives before the next product."""
    count, here = ring.mesh.shape[ring.axis], jax.lax.axis_index(ring.axis)
    sums: list[Any] = [None, None]
    waiting: list[list[jax.Array]] = [[], []]  # blocks of this device that are to be added to sums

    def advance(last: jax.Array) -> None:
        """Add the next block of each pair to the sum that has arrived meanwhile."""
        for number, step in enumerate((1, -1)):
            if not waiting[number]:
                continue
            block = waiting[number].pop(0)
            if sums[number] is None:
                sums[number] = block
                continue
            to = [(device, (device + step) % count) for device in range(count)]
            arrived = jax.lax.ppermute(sums[number], ring.axis, to)
            arrived, block, _ = jax.lax.optimization_barrier((arrived, block, last))
            sums[number] = (block.astype(jnp.float32) + arrived.astype(jnp.float32)).astype(block.dtype)

    last: Any = None
    for turn in range(0, count, 2):
        for number, (divided, other) in enumerate(pairs):
            width, step = divided.shape[1] // count, -1 if number else 1
            left = [step * (count - 1 - one) for one in (turn, turn + 1)]
            places = [jax.lax.rem(here + (one + count), count) * width for one in left]
            if last is not None:
                advance(last)
                places, sums[0], sums[1] = jax.lax.optimization_barrier((places, sums[0], sums[1]))
            blocks = [jax.lax.dynamic_slice_in_dim(divided, place, width, 1) for place in places]
            found = product(jnp.concatenate(blocks, axis=1), other).astype(divided.dtype)
            waiting[number] += jnp.split(found, 2, axis=1 if ring.dimension else 0)
            last = found
    while any(waiting):
        advance(last)
        sums[0], sums[1], last = jax.lax.optimization_barrier((sums[0], sums[1], last))
    return sums
