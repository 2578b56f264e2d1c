"""A layer of Qwen3-30B-A3B's experts compiles for a TPU slice as it should: cut, not gathered, and not copied."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ttpu_core.sharding.parallelism import parse_mesh
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, TRAINING_STRATEGY, Strategy
from ttpu_core.spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec, RouterSpec
from ttpu_core.spec.parameters import layer_parameters
from ttpu_jax.aot import hlo
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.model.modules import RESIDUAL, Parameters, Runtime
from ttpu_jax.model.moe import MoE
from ttpu_jax.ops.parts import OVERFLOW
from ttpu_jax.params.placement import Placement

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("little_effort")]

HIDDEN = 2048
SPEC = MoESpec(128, 8, 768, router=RouterSpec(renormalize=True))
EXPERT_BYTES = 3 * 768 * HIDDEN * 2
KERNEL_BYTES = 128 * EXPERT_BYTES


def compiled(
    mesh_text: str,
    batch: int,
    seq: int,
    *,
    spec: MoESpec = SPEC,
    gradient: bool = False,
    hidden: int = HIDDEN,
    topology_name: str = "v5e:2x4",
    strategy: Strategy = DEFAULT_STRATEGY,
) -> CompiledProgram:
    """The layer, or its gradient, for eight devices."""
    topology = tpu_topology(topology_name)
    placement = Placement(make_mesh(topology, parse_mesh(mesh_text)), strategy)
    layer = LayerSpec(AttentionSpec(2, 2, 8), spec, NormSpec())
    table = {
        path.removeprefix("moe."): parameter
        for path, parameter in layer_parameters(layer, hidden).items()
        if path.startswith("moe.")
    }
    values = {
        path: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=placement.parameter(path, p))
        for path, p in table.items()
    }
    shape = (batch, seq, hidden)
    sharding = placement.sharding(placement.divisible(RESIDUAL, shape), shape, "x")
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def forward(values: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return MoE(spec, Parameters(values, table), Runtime(placement))(x)

    def loss(values: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (forward(values, x).astype(jnp.float32) ** 2).sum()

    return compile_for(topology, jax.grad(loss) if gradient else forward, values, x)


def kernels(program: CompiledProgram) -> set[str]:
    return set(re.findall(r"%([a-z_]+)[.\d]* = .* custom-call\(.*tpu_custom_call", program.hlo_text))


def kernel_copies(program: CompiledProgram) -> list[str]:
    """Instructions that write out an eighth of a kernel or more, wherever its experts and features are cut."""
    shapes = re.findall(r"= bf16\[(?:128|16),[\d,]+\]\S* (?:copy|transpose)\(%[\w.-]+\)", program.hlo_text)
    return [line for line in shapes if elements(line) >= 128 * 768 * HIDDEN // 8]


def elements(line: str) -> int:
    found = re.search(r"\[([\d,]+)\]", line)
    assert found is not None
    total = 1
    for size in found[1].split(","):
        total *= int(size)
    return total


def filled_shares(program: CompiledProgram) -> set[float]:
    """The shares of their rows that the program's kernels have on average."""
    found = [one for body in hlo.parse(program.hlo_text).computations.values() for one in body if one.stated_cost]
    assert len(found) > 1
    return {one.filled_share for one in found}


@pytest.mark.parametrize("mesh", ["tensor=8", "expert=8"])
def test_a_decode_step_reads_its_share_of_the_experts_where_it_lies(mesh: str) -> None:
    program = compiled(mesh, 32, 1)
    assert all(collective.result_bytes < 2**20 for collective in program.collectives), program.collectives
    assert {collective.op for collective in program.collectives} <= {"all-reduce", "all-gather"}
    assert kernel_copies(program) == []
    assert program.argument_bytes <= KERNEL_BYTES / 8 + 2**20
    assert program.peak_bytes <= 1.5 * program.argument_bytes  # VMEM, where a part is fetched ahead, counts as well
    assert kernels(program) == {"route_few", "experts_of_few"}
    assert not re.search(r" (sort|gather|scatter)\(", program.hlo_text)


def test_128_tokens_of_many_features_fit_on_the_chip_and_more_tokens_are_grouped() -> None:
    assert kernels(compiled("tensor=8", 128, 1, spec=MoESpec(8, 2, 14336), hidden=4096)) == {
        "route_few",
        "experts_of_few",
    }
    program = compiled("expert=8", 1, 256)
    assert kernels(program) == {"grouped_gate", "grouped_product"}
    assert filled_shares(program) == {1 / 8}, "a device has the experts of an eighth of the rows"


def test_of_many_devices_each_gathers_the_rows_of_its_own_experts() -> None:
    """An eighth of all rows on average, and room for half as many more; what has no room is computed in a loop."""
    program, all_rows = compiled("expert=8", 1, 512), 512 * 8
    assert kernels(program) == {"grouped_gate", "grouped_product", "grouped_gradient"}
    assert filled_shares(program) == {0.6667}
    assert f"bf16[{all_rows * 3 // 16},{HIDDEN}]" in program.hlo_text
    assert f"bf16[{all_rows},{HIDDEN}]" not in program.hlo_text
    (loop,) = re.findall(r' while\(.*op_name="([^"]*)"', program.hlo_text)
    assert OVERFLOW in loop.split("/")
    assert program.estimate.loops_without_trip_count == ()


@pytest.mark.slow
def test_a_gradient_gathers_over_fsdp_and_copies_nothing_more() -> None:
    experts = 32  # a quarter, which compile in two thirds of the time
    program = compiled("fsdp=2,tensor=4", 8, 128, spec=replace(SPEC, num_experts=experts), gradient=True)
    kernel_bytes = experts * EXPERT_BYTES
    gathered = [c for c in program.collectives if c.op == "all-gather" and c.result_bytes > 2**20]
    assert sum(c.result_bytes for c in gathered) <= kernel_bytes / 4 * 2  # forward, and once more for the gradient
    assert program.peak_bytes <= 8 * kernel_bytes / 8


@pytest.mark.parametrize("topology_name", ["v5e:2x4", "tpu7x:2x2x1"])
def test_rows_of_a_training_step_are_exchanged_in_the_background(topology_name: str) -> None:
    """No device has all tokens, nor a row for each of their experts; on v5e an option of the compiler lets the core
    compute meanwhile, on tpu7x SparseCores exchange."""
    spec = replace(SPEC, num_experts=32, shared=MLPSpec(4096))
    jax.config.update("jax_exec_time_optimization_effort", 0.0)  # with little, exchanges stay where they are
    program = compiled(
        "expert=8", 8, 512, spec=spec, gradient=True, topology_name=topology_name, strategy=TRAINING_STRATEGY
    )
    rows = 512 * spec.experts_per_token
    exchanges = [one for one in program.collectives if one.op == "ragged-all-to-all" and one.count]
    # Rows there, once for both passes, and back; gradients there and back; weights there twice, their gradients back.
    assert all(one.is_async for one in exchanges) and len(exchanges) == 7
    of_rows = [one for one in exchanges if one.result_bytes >= rows * HIDDEN * 2]
    assert len(of_rows) == 4 and all(one.result_bytes <= 1.5 * rows * HIDDEN * 2 for one in of_rows)
    largest = max(elements(shape) for shape in re.findall(r"= bf16(\[[\d,]+\])", program.hlo_text))
    assert largest <= max(1.5 * rows * HIDDEN, 32 * 2 * 768 * HIDDEN // 8, 2 * 4096 * HIDDEN)
    assert re.search(r"overflow/while", program.hlo_text)
    assert filled_shares(program) == {0.6667}, "a buffer has room for 1.5 times the rows"
