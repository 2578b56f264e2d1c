"""The memory of a TPU that holds an array: XLA chooses between HBM and VMEM, and here it is told."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout


def in_hbm(x: jax.Array) -> jax.Array:
    """x [...], which XLA:TPU keeps in HBM."""
    return _pinned(x, "PinToDevice", Layout(tuple(range(x.ndim))))


def in_vmem(x: jax.Array, layout: Layout) -> jax.Array:
    """x [...], which XLA:TPU keeps in VMEM in this layout, from where it is made to its last use. A program that has no
    room for it there does not compile."""
    return _pinned(x, "PinToDeviceSram", layout)


def _pinned(x: jax.Array, target: str, layout: Layout) -> jax.Array:
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found: jax.Array = jax.ffi.ffi_call(target, kind, input_layouts=(layout,), output_layouts=layout)(x)
    return found
