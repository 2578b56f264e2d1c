"""Products with quantized kernels compiled for TPUs that are not there: the kernel reads values where they lie, and
nothing dequantized is written."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.kernels import QuantizedKernel, map_arrays
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.matmul.devices import Devices

pytestmark = pytest.mark.tpu_compile


def compiled(topology_name: str, shape: tuple[int, ...], sharded: int, rows: int = 8) -> CompiledProgram:
    """A product with an int4 kernel in groups of 128, whose dimension `sharded` all devices share."""
    topology = tpu_topology(topology_name)
    mesh = make_mesh(topology, {"tensor": len(topology.devices)})
    by = tuple(("tensor",) if index == sharded else () for index in range(len(shape)))

    def array(shape: tuple[int, ...], dtype: str, axes: tuple[tuple[str, ...], ...]) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*(each or None for each in axes))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    *out, inputs = shape
    parts = QuantizedKernel(("int4", shape), ("float32", (*out, inputs // 128)), format=KernelFormat("int4", 128))
    kernel = map_arrays(parts, by, lambda part, axes: array(part[1], part[0], axes))
    x = array((1, rows, inputs), "bfloat16", ((), (), by[-1]))
    devices = Devices("tpu", mesh, by, ((), ()))
    program = compile_for(topology, lambda x, kernel: linear(x, kernel, flatten=False, devices=devices), x, kernel)
    assert program.hlo_text.count("tpu_custom_call") == 1
    assert not re.search(r"= s4\[[\d,]+\]\S* copy\(", program.hlo_text), "values are copied"
    assert not re.search(rf"bf16\[\d+,{inputs // len(topology.devices)}\]", program.hlo_text.replace(f"[{rows},", "["))
    return program


@pytest.mark.parametrize("topology_name", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_the_kernel_compiles_for_every_generation(topology_name: str) -> None:
    assert compiled(topology_name, (1536, 4096), 0).collectives == ()


def test_devices_that_share_the_inputs_exchange_sums_alone() -> None:
    program = compiled("v5e:2x4", (3840, 15360), 1)  # gemma-3-12b's down projection
    assert [collective.op for collective in program.collectives] == ["all-reduce"]
    assert program.collectives[0].result_bytes <= 8 * 3840 * 4


def test_outputs_of_several_dimensions_stay_where_they_are() -> None:
    assert compiled("v6e:2x2", (2, 14336, 4096), 1).collectives == ()
