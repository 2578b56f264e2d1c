"""Quantized kernels on devices: their shardings, and the rounding of a dense kernel on the devices that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import CheckpointError
from ttpu_core.quantization.grouping import Grouping, fit_formats
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import ArchitectureSpec, Parameter, axes
from ttpu_core.spec.kernel_format import KernelFormat, PartName, parts_of
from ttpu_core.spec.parameters import stacked_paths
from ttpu_jax.ops.kernels import QuantizedKernel, kernel_from_parts, quantize
from ttpu_jax.params.placement import Placement

IN_BYTES = {"int4": "int8", "float4_e2m1fn": "float8_e4m3fn"}
"""The dtype that holds the numbers of a 4-bit dtype on a CPU: jax 0.10.2 refuses 4-bit arguments of programs compiled
ahead there, because it reports another layout for the array than for the program."""

_ROUNDING = Lock()
"""One thread rounds at a time: on a CPU, malloc keeps what each thread needed for it."""

Groupings = Mapping[str, tuple[Grouping, ...]]
"""Flax path → how the groups of a kernel fit the mesh; of each layer where layers are stacked."""


def held_parts(parameter: Parameter, placement: Placement) -> dict[PartName, Parameter]:
    """The parts of a quantized kernel (`ttpu_core.spec.kernel_format.parts_of`), in the dtypes that the placement's
    devices hold them in. A TPU holds the 4-bit floats of experts by their codes, as `QuantizedKernel` says."""
    parts = dict(parts_of(parameter))
    kind = parts["values"].dtype or ""
    if placement.platform == "cpu":
        parts["values"] = replace(parts["values"], dtype=IN_BYTES.get(kind, kind))
    elif kind == "float4_e2m1fn" and axes.EXPERT in parameter.axes:
        parts["values"] = replace(parts["values"], dtype="int4")
    return parts


def parts_as_read(parameter: Parameter, placement: Placement) -> dict[PartName, Parameter]:
    """The parts of a kernel that is stored quantized, in the dtypes in which they are read: numbers, no codes."""
    parts = held_parts(parameter, placement)
    if _is_coded(parameter.format, parts["values"].dtype):
        parts["values"] = dict(parts_of(parameter))["values"]
    return parts


def placed_as_held(kernel: QuantizedKernel, parameter: Parameter, placement: Placement) -> QuantizedKernel:
    """A kernel whose parts are on devices as they were read, in the dtypes that these hold."""
    held = held_parts(parameter, placement)["values"].dtype
    if not _is_coded(kernel.format, held):
        return kernel
    return replace(kernel, values=_codes(kernel.values))


def as_held(kernel: QuantizedKernel, parameter: Parameter, placement: Placement) -> QuantizedKernel:
    """The kernel with its values in the dtype that the placement's devices hold them in. For use inside jit."""
    return _with_values(kernel, kernel.values, held_parts(parameter, placement)["values"].dtype or "")


def _with_values(kernel: QuantizedKernel, values: jax.Array, held: Any) -> QuantizedKernel:
    """The kernel with values that are numbers of its format, held in a dtype."""
    if _is_coded(kernel.format, held):
        return replace(kernel, values=jax.lax.bitcast_convert_type(values.astype(kernel.format.dtype), jnp.int4))
    return replace(kernel, values=values.astype(held))


def _is_coded(form: KernelFormat | None, held: Any) -> bool:
    return form is not None and form.dtype == "float4_e2m1fn" and jnp.dtype(held) == jnp.int4


@partial(jax.jit, donate_argnums=0)
def _codes(values: jax.Array) -> jax.Array:
    """The codes of 4-bit floats, in their memory."""
    return jax.lax.bitcast_convert_type(values, jnp.int4)


def held_parameters(table: Mapping[str, Parameter], placement: Placement) -> dict[str, Parameter]:
    """`ttpu_core.spec.kernel_format.stored_parameters` in the dtypes that the placement's devices hold."""
    held: dict[str, Parameter] = {}
    for path, parameter in table.items():
        if parameter.format is None:
            held[path] = parameter
        else:
            held |= {f"{path}.{name}": part for name, part in held_parts(parameter, placement).items()}
    return held


def shardings_of(placement: Placement, path: str, parameter: Parameter) -> Any:
    """The sharding of a parameter; of a quantized kernel, a `QuantizedKernel` of its parts' shardings.

    Raises:
        UnsupportedError: the mesh does not divide it.
    """
    if parameter.format is None:
        return placement.parameter(path, parameter)
    parts = {name: placement.parameter(f"{path}.{name}", part) for name, part in parts_of(parameter)}
    return kernel_from_parts(parameter.format, parts)


def round_dense(kernel: jax.Array, parameter: Parameter, placement: Placement) -> QuantizedKernel:
    """Round a dense kernel [*out, in] to the parameter's format. For use inside jit."""
    assert parameter.format is not None
    return as_held(quantize(kernel, parameter.format), parameter, placement)


def groupings_for(spec: ArchitectureSpec, placement: Placement, *, stacked: bool = False) -> Groupings:
    """How the groups of the quantized kernels fit the placement's mesh.

    Args:
        spec: the architecture before padding.
        placement: the devices.
        stacked: equal layers are stacked.
    """
    mesh = {} if placement.mesh is None else dict(placement.mesh.shape)
    padded, paddings = pad_architecture(spec, mesh, placement.strategy)
    fitted, found = fit_formats(padded, spec, paddings, mesh, placement.strategy)
    groupings: dict[str, tuple[Grouping, ...]] = {path: (grouping,) for path, grouping in found.items()}
    if stacked:
        for path, copies in stacked_paths(fitted, found):
            groupings[path] = tuple(found[copy] for copy in copies)
    return groupings


def rounded(
    kernel: jax.Array, path: str, parameter: Parameter, placement: Placement, groupings: tuple[Grouping, ...]
) -> QuantizedKernel:
    """Round a dense kernel to the nearest numbers of its format, on its devices. It is deleted.

    The result is that of one device without padding: groups are those of the original kernel.

    Args:
        kernel: [*out, in], padded for the mesh.
        path: its Flax path.
        parameter: its entry in the parameter table, whose format fits the mesh.
        placement: the devices.
        groupings: how the format's groups fit the mesh; one, or one for each layer that is stacked.

    Raises:
        CheckpointError: the kernel holds NaN or infinite weights.
    """
    assert parameter.format is not None
    if len(set(groupings)) == 1:
        groupings = groupings[:1]
    shardings = shardings_of(placement, path, parameter)
    leaves, tree = jax.tree.flatten(shardings)
    held = held_parts(parameter, placement)["values"].dtype or ""
    result, finite = _program(parameter.format, held, groupings, tuple(leaves), tree)(kernel)
    _check(path, finite)
    kernel.delete()
    return result


def rounded_by_blocks(
    blocks: Iterable[tuple[int, np.ndarray]], path: str, parameter: Parameter, placement: Placement
) -> QuantizedKernel:
    """Round a dense kernel on one device while it is read, so that neither the host nor the device ever holds it.

    Args:
        blocks: the number of the first row and the block [rows, in], of a kernel [*out, in] whose outputs are merged.
            They cover it, may overlap, and are equally high.
        path: its Flax path.
        parameter: its entry in the parameter table.
        placement: one device.

    Raises:
        CheckpointError: the kernel holds NaN or infinite weights.
    """
    assert parameter.format is not None and placement.mesh is None
    device = placement.whole()
    parts = held_parts(parameter, placement)
    empty = {name: jnp.zeros(part.shape, part.dtype, device=device) for name, part in parts.items()}
    state = kernel_from_parts(parameter.format, empty), jnp.asarray(True, device=device)
    for start, block in blocks:
        with _ROUNDING:
            state = jax.block_until_ready(_with_rows(state, block, np.int32(start)))
    _check(path, state[1])
    return state[0]


@partial(jax.jit, donate_argnums=0)
def _with_rows(
    state: tuple[QuantizedKernel, jax.Array], rows: jax.Array, start: jax.Array
) -> tuple[QuantizedKernel, jax.Array]:
    """The kernel with rows [rows, in] rounded, and whether all were finite."""
    result, finite = state

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        merged = whole.reshape(-1, *part.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(merged, part.astype(whole.dtype), start, 0).reshape(whole.shape)

    rounded = quantize(rows, result.format)
    rounded = _with_values(rounded, rounded.values, result.values.dtype)
    return jax.tree.map(put, result, rounded), finite & jnp.isfinite(rows).all()


def _check(path: str, finite: jax.Array) -> None:
    if not bool(finite):
        raise CheckpointError(
            f"{path} was to be quantized, but it holds weights that are NaN or infinite: take another copy of the "
            "checkpoint, or skip this kernel."
        )


@lru_cache(maxsize=256)
def _program(
    form: KernelFormat, held: str, groupings: tuple[Grouping, ...], leaves: tuple[Any, ...], tree: Any
) -> Callable[[jax.Array], tuple[QuantizedKernel, jax.Array]]:
    def round_all(kernel: jax.Array) -> tuple[QuantizedKernel, jax.Array]:
        if len(groupings) == 1:
            result = _round(kernel, form, groupings[0])
        else:  # padding differs between the stacked layers
            layers = [_round(one, form, grouping) for one, grouping in zip(kernel, groupings, strict=True)]
            result = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
        return _with_values(result, result.values, held), jnp.isfinite(kernel).all()

    return jax.jit(round_all, out_shardings=(jax.tree.unflatten(tree, leaves), None))


def _round(kernel: jax.Array, form: KernelFormat, grouping: Grouping) -> QuantizedKernel:
    if grouping.size is None or grouping.fitted is None:
        return quantize(kernel, form)
    original, size = replace(form, group_size=grouping.size), grouping.fitted
    sources = np.asarray(grouping.sources)
    if len(sources) * size == grouping.inputs:
        result = quantize(kernel, original)
        values = result.values
    else:
        places = np.flatnonzero(sources >= 0)[np.argsort(sources[sources >= 0])]
        by_group = kernel.reshape(*kernel.shape[:-1], -1, size)
        result = quantize(by_group[..., places, :].reshape(*kernel.shape[:-1], grouping.inputs), original)
        # Gathers of 4-bit numbers are not implemented everywhere; float32 holds all of these exactly.
        stored = result.values.astype(jnp.float32).reshape(*kernel.shape[:-1], -1, size)
        values = _taken(stored, sources, 0.0, axis=-2).reshape(kernel.shape).astype(form.dtype)
    groups = np.asarray(grouping.original_groups)
    scale = _taken(result.scale, groups, 1)
    zero = None if result.zero_point is None else _taken(result.zero_point, groups, 0)
    return QuantizedKernel(values, scale, zero, format=form)


def _taken(array: jax.Array, index: np.ndarray, padding: float, axis: int = -1) -> jax.Array:
    """The entries of `array` along an axis, and `padding` where the index is -1."""
    taken = jnp.take(array, np.maximum(index, 0), axis=axis)
    if (index >= 0).all():
        return taken
    real = (index >= 0).reshape(-1, *(1,) * (-axis - 1))
    return jnp.where(real, taken, jnp.asarray(padding, array.dtype))
