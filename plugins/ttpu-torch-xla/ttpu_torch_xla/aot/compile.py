"""Compiles a program recorded on a `TpuSlice` without a TPU. It takes the tensors that the program computes and
updates, and returns libtpu's executable with its memory on each device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.aot.slice import SliceMesh, State, TpuSlice, sharding_text
from ttpu_torch_xla.bridge import require_kernels
from ttpu_torch_xla.xla.graph import Argument, stablehlo

REPLICATED = "{replicated}"


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """The compiler's figures for a program. All sizes are bytes on one device."""

    topology: str
    num_devices: int
    peak_bytes: int  # the most HBM in use at once, arguments and results included: this has to fit
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # results that live where updated arguments were, counted in both of the above
    temp_bytes: int
    trace_seconds: float  # from the recorded graph to StableHLO
    compile_seconds: float
    compile_cpu_seconds: float  # of all threads; what other programs on this machine do not change
    kernels: int  # calls of Pallas kernels
    stablehlo: str = field(repr=False)
    executable: Any = field(repr=False, compare=False)


def compile_graph(
    results: Sequence[torch.Tensor],
    tpu: TpuSlice,
    state: State | None = None,
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> CompiledGraph:
    """Compile the program that computes `results` and the new values of `state`.

    Args:
        results: tensors recorded under `tpu.recording()`.
        state: what `tpu.state` remembered of tensors that were then updated in place; the new values take the memory
            of the old ones, and are sharded alike.

    Raises:
        UnsupportedError: it needs more memory than a device has.
        MissingDependencyError: libtpu or ttpu-jax is not installed.
    """
    require_kernels()
    import numpy as np
    from jax._src import compiler  # compiling StableHLO for absent devices has no public form
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    from ttpu_jax.aot.compile import explained
    from ttpu_jax.aot.topology import make_mesh, tpu_topology

    began = time.perf_counter()
    text, arguments = stablehlo([*results, *(state.tensors if state else ())])
    traced, busy = time.perf_counter(), time.process_time()
    topology = tpu_topology(tpu.topology.name)
    mesh = tpu.mesh_used or SliceMesh((("device", 1),))
    devices = list(topology.devices[:1])
    if mesh.num_devices > 1:
        devices = list(make_mesh(topology, dict(mesh.sizes)).devices.reshape(-1))
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([device.id for device in devices]).reshape(1, -1),
        env_options_overrides={name: str(value) for name, value in (compiler_options or {}).items()},
    )
    own = 0 if state is None else len(state.tensors)
    build = options.executable_build_options
    build.use_spmd_partitioning = len(devices) > 1
    build.use_shardy_partitioner = False
    build.allow_spmd_sharding_propagation_to_output = [True] * len(results) + [False] * own
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        module.operation.attributes["sym_name"] = ir.StringAttr.get("torch_main")
        _annotate(module, arguments, tpu, state, len(results))
        try:
            executable = compiler.backend_compile_and_load(
                devices[0].client, module, xla_client.DeviceList(tuple(devices)), options, []
            )
        except Exception as error:
            raise explained(error, topology, "the recorded graph") from error
    memory = executable.get_compiled_memory_stats()
    return CompiledGraph(
        topology=topology.name,
        num_devices=len(devices),
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        trace_seconds=traced - began,
        compile_seconds=time.perf_counter() - traced,
        compile_cpu_seconds=time.process_time() - busy,
        kernels=text.count("@tpu_custom_call"),
        stablehlo=text,
        executable=executable,
    )


def _annotate(module: Any, arguments: list[Argument], tpu: TpuSlice, state: State | None, results: int) -> None:
    """Say of each argument how it is sharded, and whether a result may take its memory."""
    from jax._src.lib.mlir import ir

    main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    shapes = [tuple(ir.RankedTensorType(one).shape) for one in main.type.inputs]
    if shapes != [shape for _, shape in arguments]:
        raise UnsupportedError(
            f"a graph with {len(shapes)} arguments was to be compiled, but torch_xla says of {len(arguments)} "
            "what they are, in another order: it is another version than 2.9, for which this is written; install that."
        )
    updated = {one: results + index for index, one in enumerate(state.arguments if state else ())}
    described = []
    for argument, _ in arguments:
        sharding = sharding_text(*tpu.partition_specs[argument]) if argument in tpu.partition_specs else REPLICATED
        attributes: dict[str, Any] = {"mhlo.sharding": ir.StringAttr.get(sharding)}
        if argument in updated:
            attributes["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), updated[argument])
        described.append(ir.DictAttr.get(attributes))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(described)
    own = [] if state is None else [sharding_text(*tpu.partition_specs[one]) for one in state.arguments]
    outputs = [ir.DictAttr.get({})] * results
    outputs += [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(sharding)}) for sharding in own]
    main.attributes["res_attrs"] = ir.ArrayAttr.get(outputs)
