"""Finds the TPU slices that a program needs: slices of a chip in ascending size that may hold an architecture, each
with a mesh that divides every parameter. The compiler decides whether the program fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import Chip, Topology, slice_sizes
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.aot.report import Layers, ProgramReport, compile_report
from ttpu_jax.aot.steps import Task

Mesh = dict[str, int]
Place = tuple[str, Mesh]

ROOM = 0.8
"""A slice is tried if weights, optimizer and cache take at most this share of a device's memory."""

TRAINING_BYTES = 16
"""Bytes per parameter: float32 weight, gradient and two moments."""

MOST_TRIED = 3
"""Number of slices that are tried, in ascending size, while the compiler reports that the program does not fit."""


def fitting_report(
    architecture: Architecture,
    places: Iterable[Place],
    *,
    task: Task,
    batch: int | None = None,
    context: int | None = None,
    layers: Layers = "unrolled",
) -> ProgramReport | None:
    """`compile_report` on the first place on which the program fits, or None if `places` is empty.

    Args:
        architecture: the model.
        places: pairs of slice name and mesh.
        task: the program's task.
        batch: number of rows; None is one per device.
        context, layers: as for `compile_report`.

    Raises:
        UnsupportedError: the program fits on none of the first three places, or cannot be compiled.
    """
    refused: UnsupportedError | None = None
    for _, (name, mesh) in zip(range(MOST_TRIED), places, strict=False):
        try:
            return compile_report(
                architecture,
                name,
                task=task,
                mesh=mesh,
                batch=batch or prod(mesh.values()),
                context=context,
                layers=layers,
            )
        except UnsupportedError as error:
            if "HBM" not in str(error):
                raise
            refused = error
    if refused is not None:
        raise refused
    return None


def inference_slices(spec: ArchitectureSpec, chip: Chip, cache_bytes: int) -> Iterator[Place]:
    """Slices for decode and prefill in bfloat16. Heads are sharded along `tensor` and experts along `expert`, so
    that no weight is gathered; remaining devices go to `data`."""
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
            if size + cache <= ROOM * chip.hbm_bytes:
                yield name, {axis: size for axis, size in mesh.items() if size > 1} or {"tensor": 1}


def training_slices(spec: ArchitectureSpec, chip: Chip) -> Iterator[Place]:
    """Slices for a training step with fully sharded parameters."""
    for name, devices in _slices(chip):
        size = _bytes_per_device(spec, {"fsdp": devices}, TRAINING_BYTES)
        if size is not None and size <= ROOM * chip.hbm_bytes:
            yield name, {"fsdp": devices}


def _slices(chip: Chip) -> Iterator[tuple[str, int]]:
    """Names of slices and their numbers of devices."""
    for size in slice_sizes(chip):
        topology = Topology(chip, size)
        yield topology.name, topology.num_devices


def _bytes_per_device(spec: ArchitectureSpec, mesh: Mesh, bytes_per_element: int) -> float | None:
    """Bytes of parameters on one device, or None if the mesh does not divide them."""
    total = 0.0
    for path, parameter in spec.parameters.items():
        try:
            sharded = DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, mesh, path)
        except UnsupportedError:
            return None
        total += parameter.size * bytes_per_element / prod(mesh[axis] for axes in sharded for axis in axes)
    return total


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
