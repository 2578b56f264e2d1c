"""Where a published model is compiled. In: an architecture and a TPU generation; out: slices from the smallest that may
hold it upwards, each with a mesh that divides every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ttpu_core.errors import UnsupportedError
from ttpu_core.plan.strategy import DEFAULT_STRATEGY
from ttpu_core.spec import ArchitectureSpec

# Sizes in chips that machines come in, the smallest first (cloud.google.com/tpu/docs).
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
SIZES = {"v5e": _FLAT, "v6e": _FLAT, "v4": _CUBIC, "v5p": _CUBIC, "tpu7x": _CUBIC}
DEVICES_PER_CHIP = {"tpu7x": 2}

ROOM = 0.8
"""The share of a device's memory that weights, optimizer and cache may take for a slice to be tried; the compiler then
decides."""

TRAINING_BYTES = 16
"""For each parameter: float32 weight, gradient and two moments."""

Mesh = dict[str, int]


def inference_slices(spec: ArchitectureSpec, chip: str, hbm_bytes: int, cache_bytes: int) -> Iterator[tuple[str, Mesh]]:
    """Slices for decode and prefill in bfloat16: heads along `tensor` and experts along `expert`, so that no weight
    needs to be gathered."""
    for name, devices in _slices(chip):
        meshes = [
            {"data": devices // tensor // expert, "expert": expert, "tensor": tensor}
            for tensor in _divisors(devices)
            for expert in _divisors(devices // tensor)
        ]
        sized = [(_bytes_per_device(spec, mesh, 2), mesh) for mesh in meshes]
        fitting = [(size, mesh["expert"], index) for index, (size, mesh) in enumerate(sized) if size is not None]
        if fitting:
            size, _, index = min(fitting)
            mesh = sized[index][1]
            cache = cache_bytes / mesh["tensor"] / mesh["data"]
            if size + cache <= ROOM * hbm_bytes:
                yield name, _without_ones(mesh)


def training_slices(spec: ArchitectureSpec, chip: str, hbm_bytes: int) -> Iterator[tuple[str, Mesh]]:
    """Slices for a training step, everything fully sharded."""
    for name, devices in _slices(chip):
        mesh = {"fsdp": devices}
        size = _bytes_per_device(spec, mesh, TRAINING_BYTES)
        if size is not None and size <= ROOM * hbm_bytes:
            yield name, mesh


def _slices(chip: str) -> Iterator[tuple[str, int]]:
    """Names of slices and how many devices they have."""
    for size in SIZES[chip]:
        yield f"{chip}:{size}", prod(map(int, size.split("x"))) * DEVICES_PER_CHIP.get(chip, 1)


def _bytes_per_device(spec: ArchitectureSpec, mesh: Mesh, bytes_per_element: int) -> float | None:
    """Bytes of parameters on one device; None where the mesh does not divide them."""
    total = 0.0
    for path, parameter in spec.parameters.items():
        try:
            cut = DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, mesh, path)
        except UnsupportedError:
            return None
        total += parameter.size * bytes_per_element / prod(mesh[axis] for axes in cut for axis in axes)
    return total


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _without_ones(mesh: Mesh) -> Mesh:
    return {axis: size for axis, size in mesh.items() if size > 1} or {"tensor": 1}
