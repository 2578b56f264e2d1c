"""Compiles a function ahead of time for a TPU topology, from abstract arguments sharded over it. No TPU is needed.
The result holds the program's memory on each device, its collectives and its estimated time; an error says why
the program does not fit."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.torus import Torus
from ttpu_jax.compiler_flags import CompilerOption, program_options
from ttpu_jax.compiling import compiled_with, lower

from .hlo import Collective, collectives
from .schedule import ScheduleEstimate, estimate
from .topology import GIB, TpuTopology, first_line

# A message of libtpu 0.0.42: "... required for HLO temporaries (37.29G) exceeds available HBM (15.75G)."
_SIZE = r"([\d.]+)([KMGT]?)"
_HBM_EXHAUSTED = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}|Used {_SIZE} of {_SIZE} hbm")
_GIB_PER_UNIT = {"": 2.0**-30, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}
_CACHE_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program's properties. All sizes are bytes on one device."""

    topology: TpuTopology
    peak_bytes: int  # peak HBM, including arguments and results: this must fit
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # results stored in donated arguments, counted in both sizes above
    temp_bytes: int
    compile_seconds: float
    compile_cpu_seconds: float  # of this process, whatever else it did meanwhile
    collectives: tuple[Collective, ...]
    estimate: ScheduleEstimate
    hlo_text: str = field(repr=False)
    executable: jax.stages.Compiled = field(repr=False, compare=False)


def compile_for(
    topology: TpuTopology,
    function: Callable[..., Any],
    *abstract_args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, CompilerOption] | None = None,
) -> CompiledProgram:
    """Compile `function` for the devices of `topology`, without running it.

    Args:
        topology: the slice.
        function: see `lower_for`.
        abstract_args: see `lower_for`.
        donate_argnums: see `lower_for`.
        compiler_options: XLA options by name, beside those of every program. One that libtpu does not know is left out
            with a warning.

    Raises:
        UnsupportedError: the program needs more memory than a device has, an argument is not sharded over the
            topology, or libtpu refuses the value of a compiler option.
    """
    lowered = lower_for(topology, function, *abstract_args, donate_argnums=donate_argnums)
    return compile_lowered(topology, lowered, _name(function), compiler_options)


def lower_for(
    topology: TpuTopology,
    function: Callable[..., Any],
    *abstract_args: Any,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Lowered:
    """Trace `function` for the devices of `topology`, without compiling it.

    While the function is traced, the arguments' mesh is the current one, so that Pallas kernels can read the device
    kind.

    Args:
        topology: the slice.
        function: a plain function, or one under `jax.jit` with its own `donate_argnums`.
        abstract_args: pytrees of `jax.ShapeDtypeStruct` with a `NamedSharding` over a mesh from `make_mesh`.
        donate_argnums: donated arguments of a plain function.

    Raises:
        UnsupportedError: an argument is not sharded over the topology.
    """
    mesh = _check_shardings(topology, abstract_args)
    jitted = _jitted(function, donate_argnums)
    with _current_mesh(mesh):
        return lower(jitted, *abstract_args)


def compile_lowered(
    topology: TpuTopology,
    lowered: jax.stages.Lowered,
    name: str,
    compiler_options: Mapping[str, CompilerOption] | None = None,
) -> CompiledProgram:
    """Compile the result of `lower_for`. `name` names the program in error messages.

    Raises:
        UnsupportedError: the program needs more memory than a device has, or libtpu refuses the value of a compiler
            option.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    try:
        with without_persistent_cache():
            options = program_options("tpu") | dict(compiler_options or {})
            executable: Any = compiled_with(lowered, options)  # Any: TPU programs have all analyses
    except jax.errors.JaxRuntimeError as error:
        raise explained(error, topology, name) from error
    compile_seconds, compile_cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    memory, text = executable.memory_analysis(), executable.as_text()
    slices = parse_topology(topology.name).slices
    return CompiledProgram(
        topology=topology,
        peak_bytes=memory.peak_memory_in_bytes - _host_bytes(memory),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        compile_seconds=compile_seconds,
        compile_cpu_seconds=compile_cpu_seconds,
        collectives=collectives(text, slices),
        estimate=estimate(text, topology.chip.name, torus=_torus(topology, executable), slices=slices),
        hlo_text=text,
        executable=executable,
    )


def _torus(topology: TpuTopology, executable: Any) -> Torus | None:
    """The interconnect with a program's devices in their order; None for several slices, for a program without arrays
    on a mesh, and for devices without coordinates."""
    shardings = jax.tree.leaves(executable.input_shardings)
    mesh = next((one.mesh for one in shardings if isinstance(one, NamedSharding)), None)
    parsed = parse_topology(topology.name)
    if mesh is None or parsed.slices > 1 or not all(hasattr(device, "coords") for device in mesh.devices.flat):
        return None
    places = tuple(tuple(device.coords[: len(parsed.size)]) for device in mesh.devices.flat)
    return Torus(places, parsed.size, parsed.wraps, topology.chip.ici_bytes_per_second)


def _host_bytes(memory: Any) -> int:
    """What a program holds in the host's memory, which the compiler counts in its peak."""
    return int(
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
        - memory.host_alias_size_in_bytes
    )


def _check_shardings(topology: TpuTopology, abstract_args: tuple[Any, ...]) -> Mesh | None:
    """The mesh that the arguments share, or None if there are several meshes or no arrays."""
    devices = set(topology.devices)
    meshes: set[Mesh] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_args):
        if not hasattr(leaf, "shape"):
            continue  # a Python number, or a static argument
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= devices:
            found = "no sharding" if sharding is None else f"{type(sharding).__name__} over other devices"
            raise UnsupportedError(
                f"compiling for {topology.name!r} was asked for, but argument {jax.tree_util.keystr(path)} of shape "
                f"{tuple(leaf.shape)} has {found}: every array needs a NamedSharding over the topology's own devices, "
                f"so pass jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(make_mesh(topology, axes), spec))."
            )
        meshes.add(mesh)
    return meshes.pop() if len(meshes) == 1 else None


def _jitted(function: Callable[..., Any], donate_argnums: int | Sequence[int]) -> Any:
    if not hasattr(function, "lower"):
        return jax.jit(function, donate_argnums=donate_argnums)
    if donate_argnums != ():
        raise UnsupportedError(
            f"donate_argnums={donate_argnums} was asked for, but {_name(function)} is already under jax.jit, "
            f"which fixes the donated arguments: give donate_argnums to that jax.jit, or pass the plain function here."
        )
    return function


@contextlib.contextmanager
def _current_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Make `mesh` the current one, unless the caller has set one.

    The mesh is abstract: under `jax.set_mesh`, values computed while tracing would be sent to absent devices."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def without_persistent_cache() -> Iterator[None]:
    """Turn JAX's persistent compilation cache off. Programs for absent devices can be stored there but not loaded.

    The flag alone is not enough, since JAX reads it once per process. The resets only make JAX read it again."""
    config: Any = jax.config  # Any: its options are not annotated
    if not (config.jax_compilation_cache_dir and config.jax_enable_compilation_cache):
        yield
        return
    with _CACHE_LOCK:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


def explained(error: Exception, topology: TpuTopology, name: str) -> Exception:
    """The error as an UnsupportedError if a user can correct it, else the error unchanged."""
    message = str(error)
    if "RESOURCE_EXHAUSTED" in message:
        return UnsupportedError(_exhausted(error, topology, name))
    if "requires allocation in the alternate memory" in message:
        return UnsupportedError(
            f"{name} was compiled for {topology.name!r}, but VMEM has no room for an array that is kept there, libtpu "
            f"saying {first_line(error)!r}: leave it more (xla_tpu_scoped_vmem_limit_kib in LIBTPU_INIT_ARGS is what "
            "products take of it), unroll layers (without='layer_loop'), or cut no rows of the residual stream "
            "(residual_stream='whole')."
        )
    if "into flag" in message:
        return UnsupportedError(
            f"compiling {name} for {topology.name!r} was asked for with options that libtpu refuses, saying "
            f"{first_line(error)!r}: leave them out or write them as this libtpu has them."
        )
    return error


def _exhausted(error: Exception, topology: TpuTopology, name: str) -> str:
    message = str(error)
    asked = f"{name} was compiled for {topology.name!r}, but"
    if match := _HBM_EXHAUSTED.search(message):
        number, unit, limit_number, limit_unit = (group for group in match.groups() if group is not None)
        needed, limit = float(number) * _GIB_PER_UNIT[unit], float(limit_number) * _GIB_PER_UNIT[limit_unit]
        return (
            f"{asked} it needs {needed:.2f} GiB of HBM on each device where {limit:.2f} GiB are available: "
            f"use more devices, shard larger arrays over more of them, or make the batch or the sequence shorter."
        )
    if "vmem" in message.lower():
        return (
            f"{asked} a kernel needs more on-chip memory (VMEM) than there is, libtpu saying "
            f"{first_line(error)!r}: use smaller blocks in that kernel."
        )
    return (
        f"{asked} it needs more memory than a device has, which is {topology.chip.hbm_bytes / GIB:.2f} GiB of HBM, "
        f"libtpu saying {first_line(error)!r}: use more devices or smaller arrays."
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
